"use strict";
// The network on a canvas: 512 nodes and their trees are redrawn in a few ms, as SVG elements they would not be.
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const STATES = { running: "running", joining: "joining", busy: "busy", silent: "busy", left: "gone", finished: "gone" };

// Fits a canvas to its box and the screen's pixels, and returns its context, cleared, in CSS pixels.
function prepared(canvas) {
  const ratio = window.devicePixelRatio || 1, { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height };
}

// Where nodes are, from 0 to 1: by latitude and longitude if all have them, else on a circle by site and rank,
// which is the same whatever else changes.
function layout(nodes) {
  const places = new Map();
  if (nodes.length && nodes.every((node) => node.lat !== undefined)) {
    const rad = Math.PI / 180, shrink = Math.cos(rad * nodes.reduce((sum, node) => sum + node.lat, 0) / nodes.length);
    const xs = nodes.map((node) => node.lon * shrink), ys = nodes.map((node) => -node.lat);
    const left = Math.min(...xs), top = Math.min(...ys);
    const wide = Math.max(...xs) - left, tall = Math.max(...ys) - top;
    const taken = new Map();
    nodes.forEach((node, index) => {
      const spot = `${node.lat} ${node.lon}`, before = taken.get(spot) || 0;
      taken.set(spot, before + 1);
      // Nodes of one place stand around it, on a spiral.
      const angle = 2.4 * before, away = 0.028 * Math.sqrt(before);
      places.set(node.rank, {
        x: (wide ? (xs[index] - left) / wide : 0.5) + away * Math.cos(angle),
        y: (tall ? (ys[index] - top) / tall : 0.5) + away * Math.sin(angle),
      });
    });
    return { places, ratio: tall ? wide / tall : 0 };
  }
  const order = [...nodes].sort((one, other) => one.site.localeCompare(other.site) || one.rank - other.rank);
  order.forEach((node, index) => {
    const angle = 2 * Math.PI * (index / order.length) - Math.PI / 2;
    places.set(node.rank, { x: 0.5 + 0.5 * Math.cos(angle), y: 0.5 + 0.5 * Math.sin(angle) });
  });
  return { places, ratio: 0 };
}

class NetworkMap {
  constructor(canvas, tip, spoken, onChoose) {
    Object.assign(this, { canvas, tip, spoken, onChoose, mode: "load", tree: null, chosen: null, view: null });
    canvas.addEventListener("mousemove", (event) => this.point(event));
    canvas.addEventListener("click", (event) => { this.point(event); this.choose(this.hovered); });
    canvas.addEventListener("mouseleave", () => this.hover(null));
    canvas.addEventListener("blur", () => this.hover(null));
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  show(frame, policy) {
    this.view = { frame, policy };
    this.draw();
  }

  draw() {
    if (!this.view) return;
    const { frame, policy } = this.view, { pen, width, height } = prepared(this.canvas);
    this.pen = pen;
    this.nodes = frame.nodes.filter((node) => node.rank !== undefined && node.rank !== null);
    const many = this.nodes.length > 48, edge = many ? 26 : width < 500 ? 40 : 54;
    this.radius = width < 500 ? 10 : 13;
    const left = new Set(this.nodes.filter((node) => node.state === "left").map((node) => node.rank));
    const { places, ratio } = layout(this.nodes);
    // A map keeps its proportions, within reason: most places lie from west to east. A circle fills the box.
    let wide = width - 2 * edge, tall = height - 2 * edge;
    if (ratio) [wide, tall] = [Math.min(wide, 1.6 * tall * Math.max(ratio, 0.6)), Math.min(tall, 1.6 * wide / ratio)];
    this.spots = new Map([...places].map(([rank, place]) => [rank, {
      x: width / 2 + (place.x - 0.5) * wide, y: height / 2 + (place.y - 0.5) * tall,
    }]));
    this.colours = Object.fromEntries(
      ["text", "dim", "card", "line", "faint", "bad", "accent", "low", "middle", "high", "running", "joining", "busy",
        "gone", "land"].map((name) => [name, colour(name)]));
    this.inTree = this.treeLinks(policy);
    this.links = frame.links.filter((link) => this.spots.has(link[0]) && this.spots.has(link[1])).map((link) => {
      const [source, target, rate, latency, load, marks] = link;
      return { source, target, rate, latency, load, marks, tree: this.inTree.has(`${source} ${target}`) && !left.has(source) && !left.has(target) };
    });
    // In a large network, links in no tree would cover everything: they are drawn for the chosen node alone.
    this.drawn = this.links.filter((link) => !many || link.tree || link.marks.includes("f") || this.touches(link));
    this.scale = this.scaleOf(this.links);
    for (const link of [...this.drawn].sort((one, other) => one.tree - other.tree)) this.drawLink(link, many);
    for (const node of this.nodes) this.drawNode(node, many);
    for (const node of this.nodes) this.drawName(node, many);
    this.hover(this.hovered ? this.sameAs(this.hovered) : null, { redraw: false });
  }

  // The links of the tree that is looked at, or of all in force.
  treeLinks(policy) {
    const found = new Set();
    (policy ? policy.trees : []).forEach(([, , up, down], index) => {
      if (this.tree !== null && this.tree !== index) return;
      up.forEach((parent, rank) => { if (parent >= 0) found.add(`${rank} ${parent}`); });
      down.forEach((parent, rank) => { if (parent >= 0) found.add(`${parent} ${rank}`); });
    });
    return found;
  }

  touches(link) {
    return [this.chosen, this.hovered].some((item) => item && item.node !== undefined
      && (link.source === item.node || link.target === item.node));
  }

  // Load is absolute. Rates and latencies span decades, so their colours follow the logarithm.
  scaleOf(links) {
    if (this.mode === "load") return { low: 0, high: 1, value: (link) => link.load };
    const values = links.map((link) => link[this.mode]).filter((value) => value > 0).map(Math.log);
    const low = Math.min(...values), high = Math.max(...values), slow = this.mode === "rate";
    const value = (link) => (link[this.mode] > 0 ? (slow ? -1 : 1) * Math.log(link[this.mode]) : null);
    return { low: slow ? -high : low, high: slow ? -low : high, value };
  }

  linkColour(link) {
    const value = link.marks.includes("m") || this.mode === "load" ? this.scale.value(link) : null;
    if (value === null || value === undefined) return this.colours.faint;
    const part = Math.min(1, Math.max(0, (value - this.scale.low) / (this.scale.high - this.scale.low || 1)));
    const { low, middle, high } = this.colours;
    return part < 0.5 ? mixed(low, middle, 2 * part) : mixed(middle, high, 2 * part - 1);
  }

  // Each direction bends to its own right, so that both are seen.
  curve(link) {
    const from = this.spots.get(link.source), to = this.spots.get(link.target);
    const across = { x: from.y - to.y, y: to.x - from.x };
    return { from, to, bend: { x: (from.x + to.x) / 2 + 0.09 * across.x, y: (from.y + to.y) / 2 + 0.09 * across.y } };
  }

  drawLink(link, many) {
    const { pen } = this, { from, to, bend } = this.curve(link), failed = link.marks.includes("f");
    const chosen = [this.chosen, this.hovered].some((item) => item && item.source === link.source
      && item.target === link.target) || this.touches(link);
    pen.strokeStyle = pen.fillStyle = failed ? this.colours.bad : this.linkColour(link);
    pen.globalAlpha = failed || chosen ? 1 : !link.tree ? 0.3 : many && this.tree === null ? 0.35 : 1;
    pen.lineWidth = (link.tree ? (many ? 1 : 2.5) : 1) + (chosen ? 1.5 : 0);
    pen.setLineDash(failed ? [3, 5] : link.marks.includes("m") ? [] : [6, 4]);
    pen.beginPath();
    pen.moveTo(from.x, from.y);
    pen.quadraticCurveTo(bend.x, bend.y, to.x, to.y);
    pen.stroke();
    pen.setLineDash([]);
    if (!many && (link.tree || chosen)) { // an arrow where the curve is two thirds of its way
      const at = along({ from, to, bend }, 0.64), angle = Math.atan2(at.dy, at.dx);
      pen.beginPath();
      for (const turn of [0, 2.5, -2.5]) pen.lineTo(at.x + 7 * Math.cos(angle + turn), at.y + 7 * Math.sin(angle + turn));
      pen.fill();
    }
    pen.globalAlpha = 1;
  }

  drawNode(node, many) {
    const { pen, colours } = this, spot = this.spots.get(node.rank), radius = many ? 4 : this.radius;
    const chosen = [this.chosen, this.hovered].some((item) => item && item.node === node.rank);
    pen.fillStyle = colours[STATES[node.state] || "gone"];
    pen.beginPath();
    pen.arc(spot.x, spot.y, radius + (chosen ? 3 : 0), 0, 2 * Math.PI);
    pen.fill();
    if (many && !chosen) return;
    pen.lineWidth = 2;
    pen.strokeStyle = colours.land;
    pen.stroke();
    if (node.waiting > 0 && node.state !== "left") { // the ring is the part of the time that its script waits
      pen.strokeStyle = colours.text;
      pen.lineWidth = 2.5;
      pen.beginPath();
      pen.arc(spot.x, spot.y, radius + 4, -Math.PI / 2, -Math.PI / 2 + 2 * Math.PI * node.waiting);
      pen.stroke();
    }
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.font = "600 12px system-ui, sans-serif";
    pen.fillStyle = colours.card;
    if (!many) pen.fillText(String(node.rank), spot.x, spot.y);
  }

  // After all nodes, so that no name is under one.
  drawName(node, many) {
    const { pen, colours } = this, spot = this.spots.get(node.rank), radius = many ? 4 : this.radius;
    if (many && ![this.chosen, this.hovered].some((item) => item && item.node === node.rank)) return;
    pen.font = "12px system-ui, sans-serif";
    const name = node.site || (many ? `rank ${node.rank}` : "");
    pen.lineWidth = 3;
    pen.strokeStyle = colours.land; // a halo: names lie across links
    pen.strokeText(name, spot.x, spot.y + radius + 14);
    pen.fillStyle = colours.text;
    pen.fillText(name, spot.x, spot.y + radius + 14);
  }

  point(event) {
    if (!this.view) return;
    const box = this.canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    let best = null, least = 14;
    for (const node of this.nodes) {
      const spot = this.spots.get(node.rank), away = Math.hypot(spot.x - x, spot.y - y);
      if (away < least) [best, least] = [{ node: node.rank }, away];
    }
    if (!best) {
      least = 7;
      for (const link of this.drawn) {
        const curve = this.curve(link);
        for (let step = 0.1; step < 0.95; step += 0.05) {
          const at = along(curve, step), away = Math.hypot(at.x - x, at.y - y);
          if (away < least) [best, least] = [{ source: link.source, target: link.target }, away];
        }
      }
    }
    if (JSON.stringify(best) !== JSON.stringify(this.hovered || null)) this.hover(best);
  }

  key(event) {
    if (!this.view || !this.nodes.length) return;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") { this.hover(null); this.choose(null); return; }
    if (event.key === "Enter" && this.hovered) { this.choose(this.hovered); return; }
    if (step === undefined) return;
    event.preventDefault();
    const here = this.hovered || {};
    const rank = here.node ?? here.source;
    if (event.key === "ArrowRight" || event.key === "ArrowLeft" || rank === undefined) {
      const index = this.nodes.findIndex((node) => node.rank === rank), count = this.nodes.length;
      this.hover({ node: this.nodes[index < 0 ? 0 : (index + step + count) % count].rank });
      return;
    }
    const links = this.links.filter((link) => link.source === rank);
    if (!links.length) return;
    const index = links.findIndex((link) => link.target === here.target);
    const next = links[index < 0 ? (step > 0 ? 0 : links.length - 1) : (index + step + links.length) % links.length];
    this.hover({ source: rank, target: next.target });
  }

  choose(item) {
    this.chosen = item;
    this.onChoose(item);
    this.draw();
  }

  sameAs(item) {
    if (item.node !== undefined) return this.spots.has(item.node) ? item : null;
    return this.links.some((link) => link.source === item.source && link.target === item.target) ? item : null;
  }

  hover(item, { redraw = true } = {}) {
    this.hovered = item;
    this.tip.hidden = !item;
    if (item) {
      const text = item.node === undefined ? this.linkText(item) : this.nodeText(item.node);
      const spot = item.node === undefined ? along(this.curve(item), 0.5) : this.spots.get(item.node);
      this.tip.textContent = text;
      const room = this.canvas.clientWidth - this.tip.offsetWidth - 4;
      const below = spot.y + 18 + this.tip.offsetHeight < this.canvas.clientHeight;
      this.tip.style.left = `${Math.max(4, Math.min(spot.x + 14, room))}px`;
      this.tip.style.top = `${below ? spot.y + 18 : Math.max(4, spot.y - 18 - this.tip.offsetHeight)}px`;
      if (redraw && document.activeElement === this.canvas) this.spoken.textContent = text;
    }
    if (redraw && this.view) this.draw();
  }

  nodeText(rank) {
    const node = this.nodes.find((each) => each.rank === rank);
    const lines = [`Rank ${rank}${node.site ? `, ${node.site}` : ""}: ${node.state}`, node.name];
    if (node.took !== undefined) lines.push(`round ${node.round} took ${Format.seconds(node.took)}`);
    if (node.waiting !== undefined) lines.push(`waits ${Format.part(node.waiting)} of the time`);
    if (node.queued !== undefined) lines.push(`queue ${Format.size(node.queued)}`);
    if (node.waits) lines.push(`waits for ${node.waits}`);
    return lines.join("\n");
  }

  linkText({ source, target }) {
    const link = this.links.find((each) => each.source === source && each.target === target);
    const lines = [`${source} → ${target}${link.tree ? ", in a tree" : ""}`];
    if (link.marks.includes("f")) lines.push("has failed");
    const how = link.marks.includes("m") ? (link.marks.includes("c") ? "at least, measured" : "measured") : "assumed";
    lines.push(`rate ${Format.rate(link.rate)} (${how})`, `latency ${Format.seconds(link.latency)}`);
    if (link.load !== null) lines.push(`load ${Format.part(link.load)}`);
    return lines.join("\n");
  }
}

// A point of a quadratic curve, and its direction there.
function along({ from, to, bend }, part) {
  const rest = 1 - part;
  return {
    x: rest * rest * from.x + 2 * rest * part * bend.x + part * part * to.x,
    y: rest * rest * from.y + 2 * rest * part * bend.y + part * part * to.y,
    dx: rest * (bend.x - from.x) + part * (to.x - bend.x),
    dy: rest * (bend.y - from.y) + part * (to.y - bend.y),
  };
}

function mixed(one, other, part) {
  const channel = (text, index) => parseInt(text.slice(1 + 2 * index, 3 + 2 * index), 16);
  const mix = (index) => Math.round(channel(one, index) * (1 - part) + channel(other, index) * part);
  return `rgb(${mix(0)} ${mix(1)} ${mix(2)})`;
}
