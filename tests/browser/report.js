// Opens an HTML report and prints, as JSON, what a user would see after clicking around in it.
// usage: node report.js CHROMIUM FILE_OR_ADDRESS [SCREENSHOT_FOLDER]
const path = require("path");
const { main, open, settled, violations } = require("./page.js");

// What docs/report.md explains, in its order.
const PARTS = ["#figures", "#findings", "#lanes-over-time h2", "#stages h2", "#lost h2"];

function number(selectors) {
  selectors.forEach((selector, index) => {
    const box = document.querySelector(selector).getBoundingClientRect();
    const circle = document.createElement("b");
    circle.className = "number";
    circle.textContent = index + 1;
    circle.style = `position: absolute; z-index: 9; left: ${Math.max(box.left - 14, 2)}px; top: ${box.top + scrollY - (box.height < 40 ? 26 : 12)}px;
      width: 28px; height: 28px; border-radius: 50%; background: #b00020; color: #fff; text-align: center; line-height: 28px`;
    document.body.append(circle);
  });
}

main(async ([executablePath, address, folder]) => {
  const { browser, page, seen } = await open(executablePath, address);
  const theme = () => page.evaluate(() => document.documentElement.dataset.theme);
  const paper = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  const column = (index) =>
    page.$$eval("#workers tbody tr", (rows, at) => rows.map((row) => row.cells[at].dataset.v ?? row.cells[at].textContent), index);
  const shot = async (name) => folder && page.screenshot({ path: path.join(folder, name) });
  const ticks = () => page.$$eval(".ruler .tick text", (all) => all.map((each) => each.textContent));
  const tip = () => page.$eval(".tip", (each) => (each.hidden ? null : [...each.children].map((line) => line.textContent)));

  seen.title = await page.title();
  seen.sections = await page.$$eval("section > h2", (all) => all.map((each) => each.textContent));
  seen.figures = await page.$$eval("#figures div", (all) => all.map((each) => [...each.querySelectorAll("dt, strong, span")].map((part) => part.textContent)));
  seen.pictureFrom = await page.$eval(".rows", (rows) => rows.getBoundingClientRect().top);
  seen.axe = await violations(page);
  seen.theme = [await theme()];
  seen.paper = [await paper()];
  await shot("report-light.png");
  if (folder) {
    await page.evaluate(number, PARTS);
    await shot("report-numbered.png");
    await page.$$eval(".number", (all) => all.forEach((each) => each.remove()));
  }
  await page.click("#theme");
  seen.theme.push(await theme());
  seen.paper.push(await paper());
  seen.axe.push(...(await violations(page)));
  await page.click("#theme");
  seen.theme.push(await theme());

  const busy = page.locator("#workers th:nth-child(4) button");
  await busy.click();
  seen.descending = await column(3);
  await busy.focus();
  await page.keyboard.press("Enter");
  seen.ascending = await column(3);
  seen.sorted = await page.$$eval("#workers th[aria-sort]", (all) => all.map((each) => each.getAttribute("aria-sort")));
  await page.locator("#workers th:nth-child(1) button").click();
  seen.names = await column(0);

  // The picture: hover, select, zoom, pan.
  await page.evaluate(() => scrollTo(0, 0));
  seen.stages = await page.locator("g.stage").count();
  const lane = page.locator('.row[aria-label="actor_rank0"]');
  const bar = lane.locator("g.stage").first();
  const box = await bar.boundingBox();
  const [x, y] = [box.x + box.width / 2, box.y + 6];
  await page.mouse.move(x, y);
  seen.hovered = await tip();
  await page.mouse.move(5, 5);
  seen.left = await tip();

  await page.mouse.move(x, y);
  seen.whole = await ticks();
  await page.mouse.wheel(0, -300);
  await page.waitForTimeout(200);
  seen.wheelOutside = [await ticks(), await page.evaluate(() => scrollY)];
  await page.evaluate(() => scrollTo(0, 0));
  await page.mouse.click(x, y);
  seen.selected = await page.locator('.legend [aria-pressed="true"]').allTextContents();
  seen.dimmed = await page.locator("g.stage.dim").count();
  await page.mouse.wheel(0, -300);
  await settled(page);
  seen.wheel = await ticks();
  const before = await bar.boundingBox();
  await page.mouse.down();
  await page.mouse.move(x + 120, y, { steps: 4 });
  await page.mouse.up();
  await settled(page);
  seen.dragged = (await bar.boundingBox()).x - before.x;
  seen.stillSelected = await page.locator('.legend [aria-pressed="true"]').allTextContents();
  seen.panned = await ticks();
  await page.locator(".zoom button").nth(2).click();
  await settled(page);
  seen.reset = await ticks();
  seen.link = await page.$eval(".zoom a", (link) => (link.hidden ? null : link.href));
  seen.command = await page.$eval("#view", (note) => (note.hidden ? null : note.textContent));
  await page.locator(".zoom button").first().click();
  await settled(page);
  seen.zoomed = await ticks();
  await page.locator('.legend [aria-pressed="true"]').click();
  seen.cleared = await page.locator("g.stage.dim").count();
  await page.locator(".zoom button").nth(2).click();
  await settled(page);

  const drawn = () => page.evaluate(() => document.querySelector(".rows").offsetWidth);
  seen.printed = [await drawn()];
  for (const event of ["beforeprint", "afterprint"]) {
    await page.evaluate((name) => dispatchEvent(new Event(name)), event);
    seen.printed.push(await drawn());
  }
  await page.click("#theme");
  await page.emulateMedia({ media: "print" });
  seen.printedPaper = [await theme(), await paper()];
  await page.emulateMedia({ media: "screen" });
  await page.click("#theme");

  await page.setViewportSize({ width: 390, height: 844 });
  await settled(page);
  seen.overflow = await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
  seen.axe.push(...(await violations(page)));
  await page.evaluate(() => { document.activeElement.blur(); scrollTo(0, 0); });
  console.log(JSON.stringify(seen));
  await browser.close();
});
