// The moments, and which of them are shown: a window of some seconds that ends at the time cursor.
// Without a cursor it ends at the newest moment and moves with it.

const KEPT = 5_000; // more than a source sends: ten minutes of seconds, or a whole recording

export class Timeline {
  moments = [];
  seconds = 300;
  /** Seconds since 1970; null: the newest moment. */
  cursor = null;

  /** Ignores what it has already: a source sends the last minutes again when it is connected anew. */
  add(moment) {
    const last = this.moments.at(-1);
    if (last && moment.at <= last.at) return false;
    this.moments.push(moment);
    if (this.moments.length > KEPT) this.moments.shift();
    return true;
  }

  /** The times at which the window begins and ends. */
  get range() {
    const newest = this.moments.at(-1);
    const end = this.cursor ?? (newest ? newest.at + (newest.seconds ?? 0) : Date.now() / 1000);
    return [end - this.seconds, end];
  }

  /** The moments in the window. */
  get shown() {
    const [from, to] = this.range;
    return this.moments.slice(this.after(from), this.after(to));
  }

  /** The moment at the end of the window. */
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
