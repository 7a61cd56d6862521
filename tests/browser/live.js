// Follows the page of a run that goes on, and prints when each step was there, and where a captured step leads, as JSON.
// usage: node live.js CHROMIUM URL SECONDS
const { main, open, settled, violations } = require("./page.js");

main(async ([executablePath, address, seconds]) => {
  const { browser, page, seen } = await open(executablePath, address, { width: 1280, height: 800 });
  const bars = page.locator("#every-step .step");
  const cut = () =>
    page.evaluate(() => [...document.querySelectorAll(".scroll")].filter((each) => each.scrollWidth > each.clientWidth + 1).map((each) => each.ariaLabel));
  seen.first = {};
  await page.evaluate(() => document.querySelector("#the-latest-steps\\,-the-last-first .fold input")?.click());
  for (const until = Date.now() + 1000 * seconds; Date.now() < until; await page.waitForTimeout(50)) {
    const title = await bars.last().getAttribute("title", { timeout: 1000 });
    seen.first[title.match(/\d+/)[0]] ??= Date.now();
  }
  seen.axe = await violations(page);
  seen.cut = await cut();
  await page.click("#theme");
  seen.axe.push(...(await violations(page)));
  await page.setViewportSize({ width: 390, height: 844 });
  await settled(page);
  seen.cut.push(...(await cut()));
  seen.overflow = await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
  seen.health = await page.locator("#health").innerText();
  await page.waitForSelector("#every-step a.step");
  await page.locator("#every-step a.step").first().click();
  await page.waitForURL(/report/);
  await settled(page);
  seen.clicked = await page.title();
  seen.timeline = await page.locator(".zoom a").getAttribute("href");
  console.log(JSON.stringify(seen));
  await browser.close();
});
