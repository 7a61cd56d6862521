// What the scripts that look at a page of ours share: a browser, what it complains about, axe-core.
const { chromium } = require("playwright-core");
const { readFileSync } = require("fs");

const AXE = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");

async function open(executablePath, address, { width = 1240, height = 900 } = {}) {
  const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu", "--no-first-run"] });
  const context = await browser.newContext({ viewport: { width, height }, colorScheme: "light" });
  const page = await context.newPage();
  const seen = { problems: [], requests: [] };
  page.on("console", (message) => message.type() === "error" && seen.problems.push(message.text()));
  page.on("pageerror", (error) => seen.problems.push(String(error)));
  page.on("request", (request) => seen.requests.push(request.url()));
  await page.goto(address.includes("://") ? address : `file://${address}`);
  await settled(page);
  return { browser, page, seen };
}

// The picture is drawn in the next frame.
async function settled(page) {
  await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
}

async function violations(page) {
  await page.evaluate(AXE);
  const { violations: found } = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
  return found.map(({ id, nodes }) => `${id}: ${nodes.slice(0, 3).map((node) => node.html.slice(0, 160)).join(" | ")}`);
}

function main(work) {
  work(process.argv.slice(2)).catch((error) => {
    console.error(error);
    process.exit(1);
  });
}

module.exports = { main, open, settled, violations };
