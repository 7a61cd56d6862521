// Unpacks the Chromium that an npm package ships, with the libraries and fonts it needs: nothing is installed
// on the machine, and no root is needed. Writes a script that starts it, and fails if that does not work.
// usage: node unpack.mjs FOLDER
import { mkdirSync, rmSync, writeFileSync } from "node:fs";
import { join, resolve } from "node:path";
import playwright from "playwright-core";

const folder = resolve(process.argv[2]);
const script = join(folder, "start");
rmSync(folder, { recursive: true, force: true });
mkdirSync(folder, { recursive: true });
process.env.TMPDIR = folder; // where the package unpacks to
process.env.AWS_EXECUTION_ENV = "AWS_Lambda_nodejs20.x"; // or else it leaves its libraries packed
const { default: chromium } = await import("@sparticuz/chromium");
const binary = await chromium.executablePath();
writeFileSync(
  join(folder, "fonts.conf"),
  `<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>${folder}/fonts</dir><dir>/usr/share/fonts</dir><cachedir>${folder}/cache</cachedir></fontconfig>\n`,
);
writeFileSync(
  script,
  `#!/bin/sh\nLD_LIBRARY_PATH='${folder}/al2023/lib' FONTCONFIG_FILE='${folder}/fonts.conf' exec '${binary}' "$@"\n`,
  { mode: 0o755 },
);
try {
  const browser = await playwright.chromium.launch({ executablePath: script, args: ["--no-sandbox", "--disable-gpu"] });
  const page = await browser.newPage();
  await page.setContent("<p>it works");
  await browser.close();
} catch (error) {
  rmSync(folder, { recursive: true, force: true });
  console.error(`The Chromium of @sparticuz/chromium does not run here: ${error.message}`);
  process.exit(1);
}
