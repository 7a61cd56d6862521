// Opens served reports one after the other and prints where the link of each to the timeline leads, of the whole
// step and of a part, as JSON.
// usage: node link.js CHROMIUM ADDRESS...
const { main, open, settled } = require("./page.js");

main(async ([executablePath, ...addresses]) => {
  const { browser, page } = await open(executablePath, addresses[0]);
  const href = () => page.$eval(".zoom a", (link) => (link.hidden ? null : link.href));
  const links = [];
  for (const address of addresses) {
    await page.goto("about:blank");
    await page.goto(address);
    await settled(page);
    const whole = await href();
    await page.locator(".zoom button").first().click();
    await settled(page);
    links.push([whole, await href()]);
  }
  console.log(JSON.stringify(links));
  await browser.close();
});
