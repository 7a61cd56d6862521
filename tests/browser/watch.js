// Opens the page of a run and prints what is seen of its watch, and where a captured step leads, as JSON.
// usage: node watch.js CHROMIUM FILE [SCREENSHOT]
const { main, open, settled, violations } = require("./page.js");

main(async ([executablePath, address, picture]) => {
  const { browser, page, seen } = await open(executablePath, address);
  const bars = page.locator("#every-step .step");
  if (picture) await page.screenshot({ path: picture });
  seen.axe = await violations(page);
  await page.click("#theme");
  seen.axe.push(...(await violations(page)));
  seen.bars = await bars.count();
  seen.marks = await page.locator("#every-step u", { hasText: "▼" }).count();
  seen.beyond = await page.locator("#every-step u", { hasText: "▲" }).count();
  seen.links = await page.locator("#every-step a.step").evaluateAll((all) => all.map((each) => each.title));
  seen.heights = await bars.evaluateAll((all) => all.map((each) => each.getBoundingClientRect().height));
  await page.setViewportSize({ width: 390, height: 844 });
  await settled(page);
  seen.overflow = await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
  if (seen.links.length) {
    await page.locator("#every-step a.step").first().focus();
    await page.keyboard.press("Enter");
    await page.waitForURL(/report/);
    seen.entered = await page.title();
  }
  console.log(JSON.stringify(seen));
  await browser.close();
});
