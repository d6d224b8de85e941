"use strict";
// A curve over time on a canvas, with marks where policies changed and where something was lost. Left and right
// move the cursor, so that values can be read without a mouse.
class Chart {
  // value(point) and bound(point) may be null: the curve has a gap there.
  constructor(canvas, { name, value, bound = null, text, onTime = null }) {
    Object.assign(this, { canvas, name, value, bound, text, onTime, cursor: null, view: null });
    canvas.addEventListener("mousemove", (event) => {
      this.moveTo(this.timeAt(event.clientX - canvas.getBoundingClientRect().left));
    });
    canvas.addEventListener("mouseleave", () => this.moveTo(null));
    canvas.addEventListener("blur", () => this.moveTo(null));
    canvas.addEventListener("click", () => this.onTime && this.cursor !== null && this.onTime(this.cursor));
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step === undefined || !this.view || !this.view.points.length) return;
      event.preventDefault();
      const { points } = this.view;
      const at = this.cursor === null ? points.length - 1 : this.nearest(this.cursor) + step;
      this.moveTo(points[Math.min(points.length - 1, Math.max(0, at))][0]);
      if (event.key && this.onTime && event.shiftKey) this.onTime(this.cursor);
    });
  }

  // now: the moment that the rest of the page shows; span: seconds before the end, or null for all.
  show(points, events, now, span) {
    const end = points.length ? points[points.length - 1][0] : 0;
    const first = span === null ? 0 : Math.max(0, points.findIndex((point) => point[0] >= end - span));
    this.view = { points: points.slice(first), events, now };
    this.draw();
  }

  nearest(time) {
    const { points } = this.view;
    let best = 0;
    points.forEach((point, index) => {
      if (Math.abs(point[0] - time) < Math.abs(points[best][0] - time)) best = index;
    });
    return best;
  }

  timeAt(x) {
    if (!this.view || this.view.points.length < 2) return null;
    return this.begin + ((x - this.left) / this.wide) * (this.end - this.begin);
  }

  moveTo(time) {
    this.cursor = time;
    if (this.view) this.draw();
  }

  draw() {
    const { pen, width, height } = prepared(this.canvas), { points, events, now } = this.view;
    const [left, right, top, bottom] = [72, 10, 14, 20];
    const values = points.map(this.value), bounds = this.bound ? points.map(this.bound) : [];
    const known = [...values, ...bounds].filter((value) => value !== null);
    pen.font = "11px system-ui, sans-serif";
    pen.fillStyle = colour("dim");
    pen.textBaseline = "middle";
    const latest = values.filter((value) => value !== null).pop();
    this.canvas.setAttribute("aria-label", `${this.name}: ${latest === undefined ? "not known yet" : this.text(latest)}`);
    if (points.length < 2 || !known.length) {
      pen.textAlign = "center";
      pen.fillText("nothing yet", width / 2, height / 2);
      return;
    }
    Object.assign(this, { begin: points[0][0], end: points[points.length - 1][0], left, wide: width - left - right });
    const most = 1.08 * Math.max(...known), x = (time) => left + (this.wide * (time - this.begin)) / (this.end - this.begin || 1);
    const y = (value) => top + (height - top - bottom) * (1 - value / (most || 1));
    pen.lineWidth = 1;
    pen.strokeStyle = colour("line");
    for (const part of [0, 0.5, 1]) {
      pen.textAlign = "right";
      pen.fillText(this.text((most * part) / 1.08), left - 6, y((most * part) / 1.08));
      stroke(pen, [[left, y((most * part) / 1.08)], [width - right, y((most * part) / 1.08)]]);
    }
    for (const part of [0, 0.5, 1]) {
      pen.textAlign = ["left", "center", "right"][2 * part];
      pen.fillText(Format.time(this.begin + part * (this.end - this.begin)), left + part * this.wide, height - 7);
    }
    for (const [time, kind] of events) {
      if (time < this.begin || time > this.end || kind === "job" || kind === "node") continue;
      pen.strokeStyle = pen.fillStyle = colour(kind === "policy" ? "accent" : "bad");
      pen.globalAlpha = 0.45;
      stroke(pen, [[x(time), top], [x(time), height - bottom]]);
      pen.globalAlpha = 1;
      pen.beginPath();
      for (const [dx, dy] of [[-4, -8], [4, -8], [0, -1]]) pen.lineTo(x(time) + dx, top + dy);
      pen.fill();
    }
    if (this.bound) {
      pen.strokeStyle = colour("dim");
      pen.setLineDash([5, 4]);
      this.line(pen, points, bounds, x, y);
      pen.setLineDash([]);
    }
    pen.lineWidth = 1.8;
    pen.strokeStyle = colour("low");
    this.line(pen, points, values, x, y);
    pen.lineWidth = 1;
    pen.strokeStyle = colour("text");
    if (now < this.end) stroke(pen, [[x(now), top], [x(now), height - bottom]]);
    if (this.cursor !== null) this.drawCursor(pen, x, y, width, height - bottom);
  }

  line(pen, points, values, x, y) {
    pen.beginPath();
    values.forEach((value, index) => {
      if (value === null) return;
      const gap = index === 0 || values[index - 1] === null;
      pen[gap ? "moveTo" : "lineTo"](x(points[index][0]), y(value));
    });
    pen.stroke();
  }

  drawCursor(pen, x, y, width, bottom) {
    const point = this.view.points[this.nearest(this.cursor)], at = x(point[0]), value = this.value(point);
    stroke(pen, [[at, 14], [at, bottom]]);
    const text = `${Format.time(point[0])}  ${value === null ? Format.none : this.text(value)}`;
    const wide = pen.measureText(text).width + 12, left = Math.min(at + 6, width - wide);
    pen.fillStyle = colour("text");
    pen.fillRect(left, 16, wide, 19);
    pen.fillStyle = colour("card");
    pen.textAlign = "left";
    pen.fillText(text, left + 6, 26);
    if (document.activeElement === this.canvas) this.canvas.setAttribute("aria-label", `${this.name}: ${text}`);
  }
}

function stroke(pen, corners) {
  pen.beginPath();
  for (const [x, y] of corners) pen.lineTo(x, y);
  pen.stroke();
}
