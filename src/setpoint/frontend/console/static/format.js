// Numbers as people read them. "–" stands for what is not known.

const NONE = "–";
const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const known = (value) => typeof value === "number" && Number.isFinite(value);

/** 7, 1,234, 56.7k, 1.23M */
export function count(value) {
  if (!known(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toFixed(size >= 1e8 ? 0 : 2)}M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(size >= 1e5 ? 0 : 1)}k`;
  return grouped.format(value);
}

/** All digits: 186,413 */
export const exact = (value) => (known(value) ? grouped.format(value) : NONE);

/** A mean of few: 3, 3.4, 57 */
export const few = (value) =>
  !known(value) ? NONE : value < 9.95 ? String(Math.round(value * 10) / 10) : count(value);

/** A rate: 0.5, 12.3, 1,234 */
export const rate = (value) =>
  !known(value) ? NONE : value > 0 && value < 100 ? value.toFixed(1) : count(value);

/** 0.4 ms, 123 ms, 1.23 s, 2 min 5 s */
export function seconds(value) {
  if (!known(value)) return NONE;
  if (value < 0.00005) return "0 ms";
  if (value < 0.01) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 1) return `${(value * 1e3).toFixed(0)} ms`;
  if (value < 10) return `${value.toFixed(2)} s`;
  if (value < 60) return `${value.toFixed(1)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
}

/** 512 B, 23.6 MB */
export function bytes(value) {
  if (!known(value)) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB"];
  const step = Math.min(Math.floor(Math.log10(Math.max(value, 1)) / 3), units.length - 1);
  return `${step ? (value / 1000 ** step).toFixed(1) : value} ${units[step]}`;
}

/** A share from 0 to 1: 0 %, 0.4 %, 57 % */
export const percent = (value) =>
  !known(value) ? NONE : `${(value * 100).toFixed(value > 0 && value < 0.0995 ? 1 : 0)} %`;

/** A time of day. `at`: seconds since 1970. */
export const clock = (at, withSeconds = true) =>
  new Date(at * 1000).toLocaleTimeString("en-GB", {
    hour: "2-digit",
    minute: "2-digit",
    second: withSeconds ? "2-digit" : undefined,
  });

/** The value of an option, as people read it. */
export function option(value) {
  if (value === null || value === undefined) return "none";
  if (typeof value === "boolean") return value ? "on" : "off";
  if (Array.isArray(value)) return value.length ? value.map(option).join(" ") : "none";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

/** The value of a live option, as `setpoint set` takes it. */
export const setting = (value) => (typeof value === "boolean" ? String(value) : option(value));
