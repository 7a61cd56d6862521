// Opens the page of a run and prints what is seen of its bars, and where they lead, as JSON.
// usage: node run.js CHROMIUM FILE
const { main, open, settled, violations } = require("./page.js");

main(async ([executablePath, address]) => {
  const { browser, page, seen } = await open(executablePath, address);
  const bars = page.locator("#every-captured-step .step");

  seen.axe = await violations(page);
  await page.click("#theme");
  seen.axe.push(...(await violations(page)));
  await page.click("#theme");
  seen.bars = await bars.evaluateAll((all) => all.map((each) => each.title));
  seen.heights = await bars.evaluateAll((all) => all.map((each) => each.getBoundingClientRect().height));
  await bars.first().focus();
  await page.keyboard.press("Enter");
  await page.waitForURL(/report/);
  seen.entered = await page.title();
  await page.goBack();
  await settled(page);
  await bars.nth(3).click();
  await page.waitForURL(/report/);
  seen.clicked = await page.title();
  await page.goBack();
  await page.setViewportSize({ width: 390, height: 844 });
  await settled(page);
  seen.overflow = await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
  seen.axe.push(...(await violations(page)));
  console.log(JSON.stringify(seen));
  await browser.close();
});
