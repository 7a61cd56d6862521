// Opens the page of a run and prints what is seen of its watch, and where a captured step leads, as JSON.
// usage: node watch.js CHROMIUM FILE [SCREENSHOT]
const { main, open, settled, violations } = require("./page.js");

main(async ([executablePath, address, picture]) => {
  const { browser, page, seen } = await open(executablePath, address);
  const bars = page.locator("#watch svg .step");
  if (picture) await page.locator("#every-step").screenshot({ path: picture });
  seen.axe = await violations(page);
  await page.click("#theme");
  seen.axe.push(...(await violations(page)));
  seen.bars = await bars.count();
  seen.marks = await page.locator("#watch svg path.mark").count();
  seen.beyond = await page.locator("#watch svg path.beyond").count();
  seen.links = await page.locator("#watch svg a").evaluateAll((all) => all.map((each) => each.getAttribute("aria-label")));
  seen.heights = await bars.evaluateAll((all) => all.map((each) => each.querySelector(".outline").getBBox().height));
  await bars.nth(Math.min(3, seen.bars - 1)).hover();
  seen.hovered = await page.$eval("#watch .tip", (each) => [...each.children].map((line) => line.textContent));
  await page.mouse.move(2, 2);
  await page.setViewportSize({ width: 390, height: 844 });
  await settled(page);
  seen.overflow = await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
  if (seen.links.length) {
    await page.locator("#watch svg a").first().focus();
    await page.keyboard.press("Enter");
    await page.waitForURL(/report/);
    seen.entered = await page.title();
  }
  console.log(JSON.stringify(seen));
  await browser.close();
});
