// Opens a timeline in the Perfetto UI and prints which range of it is shown, in nanoseconds.
// usage: node visible.js CHROMIUM ADDRESS
const { main, open } = require("./page.js");

main(async ([executablePath, address]) => {
  const { browser, page } = await open(executablePath, address);
  await page.waitForFunction(() => window.app?.trace?.timeline, null, { timeout: 120000 });
  const shown = () => page.evaluate(() => {
    const { start, duration } = window.app.trace.timeline.visibleWindow;
    const first = Number(start.integral) + start.fractional;
    return [first, first + duration];
  });
  // The range of the address is set a while after the trace can be queried.
  const [, asked] = address.match(/visStart=(\d+)/);
  const deadline = Date.now() + 30000;
  let range = await shown();
  while (Math.abs(range[0] - asked) > 0.02 * (range[1] - range[0]) && Date.now() < deadline) {
    await page.waitForTimeout(50);
    range = await shown();
  }
  console.log(JSON.stringify(range));
  await browser.close();
});
