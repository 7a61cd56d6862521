// Opens an HTML report and prints, as JSON, what a user would see after clicking around in it.
// usage: node report.js CHROMIUM FILE [SCREENSHOT_FOLDER]
const { chromium } = require("playwright-core");
const path = require("path");

(async () => {
  const [executablePath, file, folder] = process.argv.slice(2);
  const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu", "--no-first-run"] });
  const context = await browser.newContext({ viewport: { width: 1240, height: 900 }, colorScheme: "light" });
  const page = await context.newPage();
  const seen = { problems: [], requests: [] };
  page.on("console", (message) => message.type() === "error" && seen.problems.push(message.text()));
  page.on("pageerror", (error) => seen.problems.push(String(error)));
  page.on("request", (request) => seen.requests.push(request.url()));
  await page.goto("file://" + file);

  const theme = () => page.evaluate(() => document.documentElement.dataset.theme);
  const paper = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  const column = (index) =>
    page.$$eval("#workers tbody tr", (rows, at) => rows.map((row) => row.cells[at].textContent), index);
  const shot = async (name, options) => folder && page.screenshot({ path: path.join(folder, name), ...options });

  seen.title = await page.title();
  seen.sections = await page.$$eval("section > h2", (all) => all.map((each) => each.textContent));
  seen.theme = [await theme()];
  seen.paper = [await paper()];
  await shot("report-light.png");
  await page.click("#theme");
  seen.theme.push(await theme());
  seen.paper.push(await paper());
  await shot("report-dark.png");
  await page.keyboard.press("t");
  seen.theme.push(await theme());

  const busy = page.locator("#workers th:nth-child(3) button");
  await busy.click();
  seen.descending = await column(2);
  await busy.focus();
  await page.keyboard.press("Enter");
  seen.ascending = await column(2);
  seen.sorted = await page.$$eval("#workers th[aria-sort]", (all) => all.map((each) => each.getAttribute("aria-sort")));
  await page.locator("#workers th:nth-child(1) button").click();
  seen.names = await column(0);

  seen.stages = await page.$$eval("svg.gantt .stage", (all) => all.map((each) => each.getAttribute("aria-label")));
  await page.locator("svg.gantt .stage").first().focus();
  seen.focused = await page.evaluate(() => document.activeElement.getAttribute("aria-label"));

  await page.setViewportSize({ width: 390, height: 844 });
  seen.overflow = await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
  await page.evaluate(() => scrollTo(0, 0));
  await shot("report-phone.png");
  console.log(JSON.stringify(seen));
  await browser.close();
})().catch((error) => {
  console.error(error);
  process.exit(1);
});
