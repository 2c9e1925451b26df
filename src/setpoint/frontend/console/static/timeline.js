// The moments, and which of them are shown: a window of some seconds that ends at the time cursor.
// Without a cursor it ends at the newest moment and moves with it. A server with several engines has
// several lanes: one for each engine, and one for what they do together.

const KEPT = 1_200; // twice what the server keeps: ten minutes of seconds

/** When a moment ends, in seconds since 1970. */
export const endOf = (moment) => moment.at + (moment.seconds ?? 0);

/** The lane of the whole server. */
export const ALL = "all";

export class Timeline {
  lanes = new Map([[ALL, []]]);
  /** Which lane is shown: ALL, or a rank. */
  lane = ALL;
  seconds = 300;
  /** Seconds since 1970; null: the newest moment. */
  cursor = null;
  /** How many moments are kept at most. */
  kept = KEPT;

  get moments() {
    return this.lanes.get(this.lane) ?? [];
  }

  /** Ignores what it has already: a source sends the last minutes again when it is connected anew. */
  add(moment) {
    const lane = moment.dp_rank ?? ALL;
    if (!this.lanes.has(lane)) this.lanes.set(lane, []);
    const moments = this.lanes.get(lane);
    const last = moments.at(-1);
    if (last && moment.at <= last.at) return false;
    moments.push(moment);
    if (moments.length > this.kept) moments.shift();
    return lane === this.lane;
  }

  /** The times at which the window begins and ends. */
  get range() {
    const newest = this.moments.at(-1);
    const end = this.cursor ?? (newest ? endOf(newest) : Date.now() / 1000);
    return [end - this.seconds, end];
  }

  /** The moments in the window, those included that only end or only begin in it. */
  get shown() {
    const [from, to] = this.range;
    let first = this.after(from);
    if (first > 0 && endOf(this.moments[first - 1]) > from) first -= 1;
    return this.moments.slice(first, this.after(to));
  }

  /**
   * The window in columns of `seconds`, as [{begin, at, moments}]: where each begins, its middle, and
   * the moments that fall into it. One in which nothing was measured has none. Columns stay where
   * they are while the window moves, so that a line keeps its shape.
   */
  columns(seconds) {
    const [from, to] = this.range;
    const first = Math.floor(from / seconds);
    const columns = [];
    for (let number = first; number * seconds < to; number += 1) {
      columns.push({ begin: number * seconds, at: (number + 0.5) * seconds, moments: [] });
    }
    for (const moment of this.shown) {
      const begin = Math.max(Math.floor(moment.at / seconds), first);
      const end = Math.max(Math.ceil(endOf(moment) / seconds), begin + 1);
      for (const column of columns.slice(begin - first, end - first)) column.moments.push(moment);
    }
    return columns;
  }

  /** The moment at the end of the window, or the last before it. */
  get present() {
    return this.moments[this.after(this.range[1]) - 1] ?? null;
  }

  /** The index of the first moment that begins after `at`. */
  after(at) {
    let low = 0;
    let high = this.moments.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.moments[middle].at <= at) low = middle + 1;
      else high = middle;
    }
    return low;
  }
}

/** Whether nothing ran and nothing waited all through the moment. */
const isIdle = (moment) =>
  !moment.num_prefill && !moment.num_decode && moment.running === 0 && moment.queue === 0 && !moment.preparing;

const TOUCHING_S = 0.5; // moments that are further apart have a gap between them

/** Neighbouring moments of the window that `same` holds together, as [first, last]. */
export function runsOf(moments, same) {
  const runs = [];
  for (const moment of moments) {
    const [first, last] = runs.at(-1) ?? [];
    if (last && moment.at - endOf(last) < TOUCHING_S && same(first, moment)) runs.at(-1)[1] = moment;
    else runs.push([moment, moment]);
  }
  return runs;
}

/** When the server had nothing to do, as [from, to] in seconds since 1970, within the window. */
export function idleStretches(timeline) {
  const [from, to] = timeline.range;
  return runsOf(timeline.shown.filter(isIdle), () => true).map(([first, last]) => [
    Math.max(first.at, from),
    Math.min(endOf(last), to),
  ]);
}
