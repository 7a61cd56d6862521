// Writes the parts of d3 that d3.mjs names into one minified file, with the versions and licences of all that is in it.
// usage: node bundle.mjs FILE
import { readFileSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const { outputFiles, metafile } = await build({
  entryPoints: ["d3.mjs"],
  bundle: true,
  minify: true,
  format: "iife",
  globalName: "d3",
  target: "es2020",
  charset: "ascii",
  metafile: true,
  write: false,
});
const used = Object.values(metafile.outputs).flatMap(({ inputs }) =>
  Object.entries(inputs).filter(([, { bytesInOutput }]) => bytesInOutput > 0).map(([path]) => path.split("/")[1]),
);
const packages = [...new Set(used.filter((name) => name && name !== "d3.mjs"))].sort();
const byLicence = new Map();
for (const name of packages) {
  const { version } = JSON.parse(readFileSync(`node_modules/${name}/package.json`, "utf8"));
  const licence = readFileSync(`node_modules/${name}/LICENSE`, "utf8").trim();
  byLicence.set(licence, [...(byLicence.get(licence) ?? []), `${name} ${version}`]);
}
const notices = [...byLicence].map(([licence, names]) => `${names.join(", ")}\n\n${licence}`);
const banner = ["Written by `make page-library`; see requirements/page.", ...notices].join("\n\n");
writeFileSync(process.argv[2], `/*!\n${banner}\n*/\n${outputFiles[0].text}`);
