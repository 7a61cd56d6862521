// Opens the report of a step with many lanes, unfolds, and prints what is seen as JSON.
// usage: node large.js CHROMIUM FILE
const { main, open, settled, violations } = require("./page.js");

main(async ([executablePath, address]) => {
  const { browser, page, seen } = await open(executablePath, address);
  const rows = () => page.$$eval(".row", (all) => all.map((row) => `${row.classList[1]} ${row.getAttribute("aria-label")}`));
  const visible = (selector) => page.$$eval(selector, (all) => all.filter((each) => each.checkVisibility()).length);

  // Seconds that the page's thread computed, however busy the machine is.
  const devtools = await page.context().newCDPSession(page);
  await devtools.send("Performance.enable", { timeDomain: "threadTicks" });
  const computed = async () => {
    const { metrics } = await devtools.send("Performance.getMetrics");
    return metrics.find(({ name }) => name === "TaskDuration").value;
  };

  seen.folded = await rows();
  seen.axe = await violations(page);
  const button = page.locator('.label[data-role="actor"] button');
  seen.button = [await button.textContent(), await button.getAttribute("aria-label")];
  await button.focus();
  const before = await computed();
  await page.keyboard.press("Enter");
  await settled(page);
  const unfolded = await computed();
  seen.unfoldS = unfolded - before;
  seen.unfolded = await rows();
  await page.evaluate(() => document.querySelector(".zoom button").click());
  await settled(page);
  seen.zoomS = (await computed()) - unfolded;
  seen.focus = await page.evaluate(() => document.activeElement.getAttribute("aria-expanded"));
  await page.keyboard.press("Enter");
  await settled(page);
  seen.refolded = await rows();

  seen.workers = [await visible("#workers tbody tr")];
  await page.locator("#workers .fold").click();
  seen.workers.push(await visible("#workers tbody tr"));
  seen.fold = await page.textContent("#workers .fold");
  await page.locator("#workers .fold").click();
  seen.workers.push(await visible("#workers tbody tr"));
  await page.locator("#workers th:nth-child(1) button").click();
  await page.locator("#workers th:nth-child(1) button").click();
  seen.first = await page.textContent("#workers tbody tr:first-child td");
  seen.sortedRows = await visible("#workers tbody tr");

  const metrics = "#reported-by-the-loop";
  seen.metrics = [await visible(`${metrics} tbody tr`), await page.textContent(`${metrics} .fold`)];

  await page.setViewportSize({ width: 390, height: 844 });
  await settled(page);
  seen.overflow = await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
  console.log(JSON.stringify(seen));
  await browser.close();
});
