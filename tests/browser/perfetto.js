// Loads a served trace in the real Perfetto UI, runs SQL in its trace processor, prints JSON with the lanes shown.
// usage: node perfetto.js CHROMIUM URL QUERIES_JSON
const { chromium } = require("playwright-core");

(async () => {
  const [executablePath, url, queries] = process.argv.slice(2);
  const browser = await chromium.launch({
    executablePath,
    args: ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync", "--no-first-run"],
  });
  // What the trace processor calls STR_NULL and NUM_NULL.
  const page = await browser.newPage({ viewport: { width: 1600, height: 900 } });
  await page.goto(url);
  await page.waitForFunction(() => window.app?.trace?.engine, null, { timeout: 120000 });
  const results = await page.evaluate(async (statements) => {
    const all = {};
    for (const [name, { sql, columns }] of Object.entries(statements)) {
      const rows = [];
      const result = await window.app.trace.engine.query(sql);
      const shape = Object.fromEntries(Object.entries(columns).map(([key, kind]) => [key, kind === "text" ? "str_null" : 1]));
      for (const it = result.iter(shape); it.valid(); it.next()) {
        rows.push(Object.keys(columns).map((key) => it[key]));
      }
      all[name] = rows;
    }
    return all;
  }, JSON.parse(queries));
  const shown = () => window.app.trace.workspace.children.some(({ name }) => name.startsWith("controller"));
  await page.waitForFunction(shown, null, { timeout: 30000 }).catch(() => {});
  results.lanes = await page.evaluate(() =>
    window.app.trace.workspace.children.map(({ name, children }) => [name, children.map((node) => node.name)]),
  );
  console.log(JSON.stringify(results));
  await browser.close();
})().catch((error) => {
  console.error(error);
  process.exit(1);
});
