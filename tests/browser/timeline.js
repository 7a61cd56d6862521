// Photographs a served timeline in the Perfetto UI: the controller's stages, and below them each worker's busiest
// thread, or some threads of one process.
// usage: node timeline.js CHROMIUM ADDRESS PICTURE [PROCESS THREAD...]
const { chromium } = require("playwright-core");

const MARGIN = 0.02; // of the step, on either side
const WIDTH = 1150; // little more than a README shows, so that names stay readable
const AXIS = 58; // pixels above the tracks

async function arrange({ margin, only, threads }) {
  const { app } = window;
  const { trace } = app;
  async function rows(sql, shape) {
    const found = [];
    const result = await trace.engine.query(sql);
    for (const it = result.iter(shape); it.valid(); it.next()) {
      found.push(Object.fromEntries(Object.keys(shape).map((key) => [key, it[key]])));
    }
    return found;
  }
  const slices = `slice join thread_track on track_id = thread_track.id
    join thread using (utid) join process using (upid)`;
  const tracks = await rows(
    `select track_id as id, thread.name as thread, process.name as process, count(*) as slices from ${slices}
     where process.name not like '% requests' group by track_id order by process.pid, thread.name != 'stages', slices desc`,
    { id: 1, thread: "str", process: "str", slices: 1 },
  );
  const seen = new Set();
  const busiest = tracks.filter(({ thread, process }) => {
    const wanted = process.startsWith("controller") === (thread === "stages") && !seen.has(process);
    if (wanted) seen.add(process);
    return wanted;
  });
  const nodes = trace.workspace.flatTracks;
  const stages = tracks.filter(({ thread, process }) => process.startsWith("controller") && thread === "stages");
  const shown = only
    ? [...stages, ...threads.map((name) => tracks.find(({ thread, process }) => process === only && thread === name))]
    : busiest;
  const chosen = shown.map(({ id, thread, process }) => {
    const node = nodes.find((each) => trace.tracks.getTrack(each.uri)?.tags?.trackIds?.includes(id));
    const lane = process.split(" ")[0];
    node.name = node.title = thread === "stages" ? `${lane} stages` : only ? thread : lane;
    return node;
  });
  for (const node of [...trace.workspace.children]) node.remove();
  for (const node of chosen) {
    node.remove();
    trace.workspace.addChildLast(node);
  }
  const [step] = await rows(
    `select min(slice.ts) as first, max(slice.ts + slice.dur) as last from ${slices} where thread.name = 'stages'`,
    { first: 1n, last: 1n },
  );
  const pad = BigInt(Math.round(Number(step.last - step.first) * margin));
  trace.timeline.setViewportTime(step.first - pad, step.last + pad);
  app.sidebar.toggleVisibility();
}

(async () => {
  const [executablePath, address, picture, only, ...threads] = process.argv.slice(2);
  const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu", "--no-first-run"] });
  const page = await browser.newPage({ viewport: { width: WIDTH, height: 1400 }, deviceScaleFactor: 2 });
  await page.goto(address);
  await page.waitForFunction(() => window.app?.trace?.engine, null, { timeout: 120000 });
  await page.waitForTimeout(2000);
  await page.evaluate(arrange, { margin: MARGIN, only, threads });
  await page.waitForTimeout(2000);
  const [top, bottom] = await page.evaluate(() => {
    const boxes = [...document.querySelectorAll(".pf-track")].map((each) => each.getBoundingClientRect());
    return [Math.min(...boxes.map((box) => box.top)), Math.max(...boxes.map((box) => box.bottom))];
  });
  const y = top - AXIS;
  await page.screenshot({ path: picture, clip: { x: 0, y, width: WIDTH, height: bottom - y } });
  const lanes = await page.evaluate(() => window.app.trace.workspace.children.map((node) => node.name));
  console.log(JSON.stringify({ lanes }));
  await browser.close();
})().catch((error) => {
  console.error(error);
  process.exit(1);
});
