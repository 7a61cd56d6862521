// Opens a served report and prints where its link to the timeline leads, as JSON.
// usage: node link.js CHROMIUM ADDRESS
const { main, open } = require("./page.js");

main(async ([executablePath, address]) => {
  const { browser, page } = await open(executablePath, address);
  console.log(JSON.stringify(await page.$eval(".zoom a", (link) => (link.hidden ? null : link.href))));
  await browser.close();
});
