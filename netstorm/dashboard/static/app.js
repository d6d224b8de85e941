"use strict";
// The page: what is chosen, and the parts that show it.
const element = (id) => document.getElementById(id);
const model = new Model();
let source = null, shownEvents = null, shownTrees = null, waiting = false;

const state = (row) => `s-${row.state}`;
const nodes = new LiveTable(element("nodes"), [
  { name: "rank", value: (node) => node.rank ?? null, text: (node) => Format.count(node.rank) },
  { name: "site", kind: "left", value: (node) => node.site, text: (node) => node.site || Format.none },
  { name: "node", kind: "left", value: (node) => node.name, text: (node) => node.name },
  { name: "state", kind: "left", value: (node) => node.state, text: (node) => node.state, state },
  { name: "round", value: (node) => node.round, text: (node) => Format.count(node.round) },
  { name: "took", value: (node) => node.took, text: (node) => Format.seconds(node.took) },
  { name: "waiting", value: (node) => node.waiting, text: (node) => Format.part(node.waiting) },
  { name: "waited", value: (node) => node.waited, text: (node) => Format.seconds(node.waited) },
  { name: "queue", value: (node) => node.queued, text: (node) => Format.size(node.queued) },
  { name: "sending", value: (node) => node.sending, text: (node) => Format.rate(node.sending) },
  { name: "sent", value: (node) => node.sent, text: (node) => Format.size(node.sent) },
  { name: "heard", value: (node) => node.heard, text: (node) => Format.seconds(node.heard) },
  { name: "waits for", kind: "text", value: (node) => waits(node), text: (node) => waits(node) },
], { sort: 0, onChoose: (node) => choose({ node: node.rank }) });

const links = new LiveTable(element("links"), [
  { name: "from", value: (link) => link[0], text: (link) => nameOf(link[0]) },
  { name: "to", value: (link) => link[1], text: (link) => nameOf(link[1]) },
  { name: "rate", value: (link) => link[2], text: (link) => (link[5].includes("c") ? "≥ " : "") + Format.rate(link[2]) },
  { name: "latency", value: (link) => link[3], text: (link) => Format.seconds(link[3]) },
  { name: "load", value: (link) => link[4], text: (link) => Format.part(link[4]) },
  { name: "what", kind: "text", value: (link) => link[5], text: (link) => aboutLink(link),
    state: (link) => (link[5].includes("f") ? "s-link" : "") },
], { sort: 4, descending: true, most: 300, onChoose: (link) => choose({ source: link[0], target: link[1] }) });

const trees = new LiveTable(element("trees"), [
  { name: "share", value: (tree) => tree[1], text: (tree) => Format.part(tree[1]) },
  { name: "root, and in brackets who sends to it", kind: "text", value: (tree) => tree[0], text: (tree) => branches(tree) },
]);

const keys = new LiveTable(element("keys"), [
  { name: "key", kind: "text", value: (key) => key.name, text: (key) => key.name },
  { name: "store", value: (key) => key.store, text: (key) => Format.count(key.store) },
  { name: "type", kind: "left", value: (key) => key.dtype, text: (key) => key.dtype },
  { name: "shape", kind: "left", value: (key) => key.shape.length, text: (key) => key.shape.join("×") || "1" },
  { name: "size", value: (key) => key.bytes, text: (key) => Format.size(key.bytes) },
  { name: "ranks", value: (key) => key.members, text: (key) => (key.members ? String(key.members) : "all") },
], { sort: 4, descending: true });

const map = new NetworkMap(element("map"), element("tip"), element("spoken"), (item) => mark(item));
const jump = (time) => { if (source instanceof RecordingSource) source.showTime(time); };
const charts = [
  new Chart(element("round-chart"), { name: "Round time", value: (point) => point[1], text: Format.seconds, onTime: jump }),
  new Chart(element("goodput-chart"),
    { name: "Goodput", value: (point) => point[2], bound: (point) => point[3], text: Format.rate, onTime: jump }),
];

function waits(node) {
  if (node.busy) return `alive, but its Python has not run for ${Format.seconds(node.busy)}`;
  return node.waits || "";
}

let sites = new Map();
const nameOf = (rank) => (sites.get(rank) ? `${rank} ${sites.get(rank)}` : String(rank));

function aboutLink([source, target, , , , marks]) {
  const failed = model.frame.failed.find((link) => link[0] === source && link[1] === target);
  if (failed) return `has failed: ${failed[2]}`;
  const words = [marks.includes("t") ? "in a tree" : "", marks.includes("m") ? "" : "not measured",
    marks.includes("o") ? "measured long ago" : ""];
  return words.filter(Boolean).join(", ");
}

// A tree as netstorm top writes it: 0(1 2(3)).
function branches([root, , up, down]) {
  const written = (parents) => {
    const below = new Map();
    parents.forEach((parent, rank) => { if (parent >= 0) below.set(parent, [...(below.get(parent) || []), rank]); });
    const branch = (rank) => `${rank}${below.has(rank) ? `(${below.get(rank).map(branch).join(" ")})` : ""}`;
    return branch(root);
  };
  const there = written(up), back = written(down);
  return there === back ? there : `${there}, and down again ${back}`;
}

function choose(item) {
  map.choose(item);
  element("map").scrollIntoView({ block: "nearest" });
}

function mark(item) {
  nodes.chosen = item && item.node !== undefined ? (node) => node.rank === item.node : null;
  links.chosen = item && item.source !== undefined ? (link) => link[0] === item.source && link[1] === item.target : null;
  if (model.frame) nodes.show(nodes.rows), links.show(links.rows);
}

// Fills a select only if its choices are others: an open one would close.
function offer(select, choices, chosen) {
  const now = [...select.options].map((option) => `${option.value} ${option.textContent}`).join("\n");
  if (now !== choices.map(([value, text]) => `${value} ${text}`).join("\n")) {
    select.replaceChildren(...choices.map(([value, text]) => new Option(text, value)));
  }
  select.value = chosen;
}

function show() {
  waiting = false;
  const { frame, policy } = model;
  if (!frame) return;
  const here = frame.nodes.filter((node) => node.state !== "left"), last = model.points[model.points.length - 1];
  document.title = `${frame.job}: ${frame.phase} – NetStorm`;
  offer(element("job"), model.jobs.map((job) => [job, job]), frame.job);
  element("phase").textContent = frame.phase;
  element("phase").className = `badge ${frame.phase}`;
  element("headline").textContent = frame.phase === "running" ? `for ${Format.elapsed(frame.age)}${frame.view ? `; ${frame.view}` : ""}` : frame.text;
  element("tile-nodes").textContent = here.length < frame.workers ? `${here.length} of ${frame.workers}` : String(here.length);
  const slowest = Math.max(...here.map((node) => node.took ?? -1));
  element("tile-round").textContent = slowest < 0 ? Format.none : Format.seconds(slowest);
  element("tile-goodput").textContent = Format.rate(frame.goodput);
  const bound = boundAt(frame.time, last);
  element("tile-goodput-about").textContent = bound && frame.goodput ? `goodput, ${Format.part(frame.goodput / bound)} of the bound` : "goodput";
  element("tile-policy").textContent = String(frame.policy);
  element("tile-policy-about").textContent = `policy, for ${Format.elapsed(frame.since)}`;
  element("tile-failed").textContent = String(frame.failed.length);
  element("cost").hidden = frame.cost === undefined;
  element("tile-cost").textContent = frame.cost === undefined ? Format.none : String(frame.cost);
  sites = new Map(frame.nodes.map((node) => [node.rank, node.site]));
  nodes.show(frame.nodes);
  links.show(frame.links);
  const more = frame.all_links > frame.links.length ? `, of ${frame.all_links}` : "";
  element("links-about").textContent = `${frame.links.length}${more}`;
  keys.show(frame.keys.first || []);
  const shown = (frame.keys.first || []).length;
  element("keys-about").textContent = `${frame.keys.count}, ${Format.size(frame.keys.bytes)}${shown < frame.keys.count ? `; the first ${shown}` : ""}`;
  if (shownTrees !== policy) showTrees(policy);
  element("policy").textContent = policy ? `Policy ${policy.version}: ${policy.reason || "no reason given"}`
    + (frame.considered && !policy.reason.includes(frame.considered) ? `. Since then: ${frame.considered}` : "") : "";
  map.show(frame, policy);
  legend();
  const span = Number(element("span").value) || null;
  for (const chart of charts) chart.show(model.points, model.events, frame.time, span);
  showEvents();
  showMoment();
  element("footer").textContent = `NetStorm ${frame.release}, scheduler ${frame.scheduler}`
    + (frame.share < 1 ? `; the job plans with ${Format.part(frame.share)} of each link` : "");
  if (!document.documentElement.dataset.shown) { // when the first view was there, for whoever measures
    document.documentElement.dataset.shown = String(Math.round(performance.now()));
  }
}

function boundAt(time, last) {
  if (!(source instanceof RecordingSource)) return last ? last[3] : null;
  const points = model.points.filter((point) => point[0] <= time);
  return points.length ? points[points.length - 1][3] : null;
}

function showTrees(policy) {
  shownTrees = policy;
  trees.show(policy ? policy.trees : []);
  const each = (policy ? policy.trees : []).map(([root, share], index) => [String(index), `root ${root}, ${Format.part(share)}`]);
  if (map.tree !== null && map.tree >= each.length) map.tree = null;
  offer(element("tree"), [["", "all in force"], ...each], map.tree === null ? "" : String(map.tree));
}

function showEvents() {
  const { events } = model, newest = events[events.length - 1];
  if (shownEvents === newest) return;
  shownEvents = newest;
  const replays = source instanceof RecordingSource;
  element("events").replaceChildren(...events.slice(-200).reverse().map(([time, kind, text]) => {
    const item = document.createElement("li"), when = document.createElement("time");
    const what = document.createElement("b"), words = document.createElement("span");
    const place = replays ? document.createElement("button") : when;
    place.textContent = Format.time(time);
    if (replays) {
      place.type = "button";
      place.addEventListener("click", () => jump(time));
      when.append(place);
    }
    what.textContent = kind;
    what.className = `s-${kind}`;
    words.textContent = text;
    item.append(when, what, words);
    return item;
  }));
}

function showMoment() {
  if (!(source instanceof RecordingSource)) return;
  element("slider").max = String(source.frames.length - 1);
  element("slider").value = String(source.index);
  element("moment").textContent = `${Format.time(model.frame.time)} (${source.index + 1} of ${source.frames.length})`;
}

function legend() {
  const box = element("legend"), words = { load: ["idle", "full"], rate: ["fast", "slow"], latency: ["near", "far"] };
  const [low, high] = words[map.mode];
  if (box.dataset.mode === map.mode) return;
  box.dataset.mode = map.mode;
  const entry = (text, kind) => {
    const span = document.createElement("span"), dot = document.createElement("i");
    dot.className = kind;
    span.append(dot, text);
    return span;
  };
  const scale = document.createElement("span"), bar = document.createElement("span");
  bar.className = "scale";
  scale.append(`${map.mode}: ${low}`, bar, high);
  box.replaceChildren(scale, entry("running", "s-running"), entry("joining", "s-joining"), entry("busy or silent", "s-busy"),
    entry("left or finished", "s-left"), entry("failed link", "s-failed"), "ring: part of the time that waits");
}

function later() {
  if (!waiting) requestAnimationFrame(show);
  waiting = true;
}

let player = null;
function pause() {
  clearInterval(player);
  player = null;
  element("play").textContent = "Play";
}
element("play").addEventListener("click", () => {
  if (player !== null) { pause(); return; }
  if (source.index >= source.frames.length - 1) source.show(0);
  element("play").textContent = "Pause";
  player = setInterval(() => {
    source.show(source.index + 1);
    if (source.index >= source.frames.length - 1) pause();
  }, 250);
});
element("slider").addEventListener("input", (event) => { pause(); source.show(Number(event.target.value)); });
element("job").addEventListener("change", (event) => { pause(); shownEvents = shownTrees = null; source.open(event.target.value); });
element("colour").addEventListener("change", (event) => { map.mode = event.target.value; later(); });
element("tree").addEventListener("change", (event) => { map.tree = event.target.value === "" ? null : Number(event.target.value); later(); });
element("span").addEventListener("change", later);
window.addEventListener("resize", later);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", later);

openSource(model, (problem) => {
  element("lost").hidden = !problem;
  element("lost").textContent = problem;
  later();
}).then((opened) => {
  source = opened;
  element("replay").hidden = !(source instanceof RecordingSource);
  later();
});
