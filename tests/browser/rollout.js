// Opens a report with trajectories and prints, as JSON, what is seen of the section on its rollout.
// usage: node rollout.js CHROMIUM FILE [SCREENSHOT_FOLDER]
const path = require("path");
const { main, open, settled, violations } = require("./page.js");

main(async ([executablePath, address, folder]) => {
  const { browser, page, seen } = await open(executablePath, address);
  seen.axe = await violations(page);
  seen.bars = await page.$$eval("#rollout .stacked", (bars) =>
    bars.map((bar) => [...bar.children].map((part) => [part.title, Math.round(part.getBoundingClientRect().width)])));
  seen.titles = await page.$$eval("#rollout .bar b", (all) => all.map((each) => each.textContent));
  seen.keys = await page.$$eval("#rollout tbody i", (all) => all.map((each) => getComputedStyle(each).backgroundColor));
  if (folder) await page.locator("#rollout").screenshot({ path: path.join(folder, "rollout.png") });
  await page.click("#theme");
  seen.axe.push(...(await violations(page)));
  await page.setViewportSize({ width: 390, height: 800 });
  await settled(page);
  seen.axe.push(...(await violations(page)));
  seen.phone = await page.evaluate(() => document.documentElement.scrollWidth);
  console.log(JSON.stringify(seen));
  await browser.close();
});
