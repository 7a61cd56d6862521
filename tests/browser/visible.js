// Opens a timeline in the Perfetto UI and prints which range of it is shown, in nanoseconds.
// usage: node visible.js CHROMIUM ADDRESS
const { main, open } = require("./page.js");

const LOADED_MS = 4000; // the range is set a while after the trace can be queried

main(async ([executablePath, address]) => {
  const { browser, page } = await open(executablePath, address);
  await page.waitForFunction(() => window.app?.trace?.timeline, null, { timeout: 120000 });
  await page.waitForTimeout(LOADED_MS);
  const range = await page.evaluate(() => {
    const { start, duration } = window.app.trace.timeline.visibleWindow;
    const first = Number(start.integral) + start.fractional;
    return [first, first + duration];
  });
  console.log(JSON.stringify(range));
  await browser.close();
});
