"use strict";
// Where the page has a job from: a recording in the page or beside it, or the server's events. All end in the same
// model, so that nothing else on the page knows which it is.
class Model {
  constructor() { this.clear(); }

  clear() {
    this.frame = null;
    this.points = [];
    this.events = [];
    this.policies = new Map();
    this.jobs = [];
  }

  take(update) {
    if (update.reset) this.clear();
    for (const policy of update.policies || []) this.policies.set(policy.version, policy);
    this.points.push(...(update.points || []));
    this.events.push(...(update.events || []));
    // A tab that is open all night must not grow; the server keeps as many.
    if (this.points.length > 4000) this.points = this.points.filter((_, index) => index % 2);
    if (this.events.length > 1000) this.events.splice(0, this.events.length - 1000);
    if (update.frame) {
      this.frame = update.frame;
      this.jobs = (update.frame.jobs || []).map((line) => line.job);
      if (!this.jobs.length) this.jobs = [update.frame.job];
    }
  }

  get policy() { return this.frame && this.policies.get(this.frame.policy); }
}

// Calls changed(problem) after each message; problem is empty while all is well.
class LiveSource {
  constructor(model, changed) {
    this.model = model;
    this.changed = changed;
    this.open(null);
  }

  open(job) {
    if (this.stream) this.stream.close();
    this.model.clear();
    this.stream = new EventSource(job === null ? "events" : `events?job=${encodeURIComponent(job)}`);
    this.stream.onmessage = (message) => {
      const update = JSON.parse(message.data);
      this.model.take(update);
      this.changed(update.lost ? `No answer from the job: ${update.lost}. What is shown is old.` : "");
    };
    // The browser tries again by itself.
    this.stream.onerror = () => this.changed("The dashboard does not answer: it has ended, or cannot be reached.");
  }
}

class RecordingSource {
  constructor(model, changed, records) {
    this.model = model;
    this.changed = changed;
    this.records = records;
    this.open(Object.keys(records)[0]);
  }

  open(job) {
    const record = this.records[job];
    this.frames = record.frames;
    this.model.take({ reset: true, ...record, frame: this.frames[this.frames.length - 1] });
    this.model.jobs = Object.keys(this.records);
    this.show(this.frames.length - 1);
  }

  show(index) {
    this.index = Math.min(this.frames.length - 1, Math.max(0, index));
    this.model.frame = this.frames[this.index];
    this.changed("");
  }

  // The last frame that is not later than a time.
  showTime(time) {
    const later = this.frames.findIndex((frame) => frame.time > time);
    this.show(later < 0 ? this.frames.length - 1 : later - 1);
  }
}

async function openSource(model, changed) {
  const inside = document.getElementById("recording");
  if (inside) return new RecordingSource(model, changed, JSON.parse(inside.textContent));
  const answer = await fetch("recording.json");
  if (answer.status === 200) return new RecordingSource(model, changed, await answer.json());
  return new LiveSource(model, changed);
}
