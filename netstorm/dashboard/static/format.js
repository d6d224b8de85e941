"use strict";
// Numbers as people read them; a dash is what nobody knows. The terminal's view has the same units.
const Format = {
  none: "–",

  scaled(value, units, unit) {
    if (value === null || value === undefined) return Format.none;
    let index = 0;
    while (value >= 999.5 && index < units.length - 1) { value /= 1000; index += 1; }
    return `${Number(value.toPrecision(3))} ${units[index]}${unit}`;
  },
  rate: (bits) => Format.scaled(bits, ["", "k", "M", "G", "T"], "bit/s"),
  size: (bytes) => Format.scaled(bytes, ["", "k", "M", "G", "T"], "B"),

  seconds(value) {
    if (value === null || value === undefined) return Format.none;
    if (value === 0) return "0 s";
    if (value >= 120) return Format.elapsed(value);
    if (value >= 1) return `${Number(value.toPrecision(3))} s`;
    return value >= 0.001 ? `${Number((1000 * value).toPrecision(3))} ms` : `${Math.round(1e6 * value)} µs`;
  },
  elapsed(value) {
    const whole = Math.max(0, Math.floor(value)), two = (number) => String(number).padStart(2, "0");
    const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
    return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
  },
  part: (value) => (value === null || value === undefined ? Format.none : `${Number((100 * value).toPrecision(2))} %`),
  count: (value) => (value === null || value === undefined ? Format.none : String(value)),

  // A simulation counts its seconds from 0; a job's are those of the world.
  time(value) {
    return value < 1e8 ? Format.elapsed(value) : new Date(1000 * value).toLocaleTimeString([], { hour12: false });
  },
};
