// The live charts: one card for each, whose legend shows the newest figures, or those under the
// pointer. All share one time axis. Nothing is drawn that was not measured: a line ends where its
// figure is not known, and a stretch without requests is shaded.

import { make, setText } from "./dom.js";
import { clock, count, few, percent, rate, seconds } from "./format.js";
import { colour } from "./theme.js";
import { idleStretches } from "./timeline.js";

const { uPlot } = window; // its minified build is a classic script, which the page loads first

const hitRate = (moment) => {
  const cached = moment.cached_tokens ?? 0;
  const all = cached + (moment.new_tokens ?? 0);
  return all ? cached / all : null;
};
const quantile = (name) => (moment) => moment.quantiles?.[name] ?? null;
const field = (name) => (moment) => moment[name] ?? null;

// How the values of several moments become one.
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const largest = (values) => Math.max(...values);
const total = (values) => values.reduce((sum, value) => sum + value, 0);

// scale: "right" has an axis of its own. bars: sums, not a course; a moment counts when it begins.
const CHARTS = [
  {
    title: "Throughput",
    unit: "tokens/s",
    show: rate,
    series: [
      {
        label: "Input",
        colour: "--s-orange",
        value: field("input_throughput"),
        scale: "right",
        fill: true,
        width: 0.8,
      },
      { label: "Output", colour: "--s-blue", value: field("gen_throughput") },
    ],
  },
  {
    title: "Requests",
    unit: "",
    show: few,
    whole: true,
    series: [
      { label: "Running", colour: "--s-blue", value: field("running"), fill: true },
      { label: "Waiting", colour: "--s-orange", value: field("queue") },
      { label: "Grammar", colour: "--s-purple", value: field("preparing") },
    ],
  },
  {
    title: "KV pool in use",
    unit: "",
    show: percent,
    top: 1,
    series: [
      { label: "Usage", colour: "--s-teal", value: field("usage"), fill: true },
      { label: "Max", colour: "--s-grey", value: field("usage_max"), join: largest },
    ],
  },
  {
    title: "Time to first token",
    unit: "",
    show: seconds,
    series: [
      { label: "p50", colour: "--s-blue", value: quantile("ttft_p50") },
      { label: "p95", colour: "--s-red", value: quantile("ttft_p95"), join: largest },
    ],
  },
  {
    title: "Time between tokens",
    unit: "",
    show: seconds,
    series: [
      { label: "p50", colour: "--s-blue", value: quantile("itl_p50") },
      { label: "p95", colour: "--s-red", value: quantile("itl_p95"), join: largest },
    ],
  },
  {
    title: "Prefix cache and retractions",
    unit: "",
    show: percent,
    top: 1,
    series: [
      { label: "Hit rate", colour: "--s-teal", value: hitRate },
      {
        label: "Retracted",
        colour: "--s-red",
        value: (moment) => moment.retracted ?? 0,
        join: total,
        scale: "right",
        show: few,
        bars: true,
        whole: true,
      },
    ],
  },
];

const HEIGHT = 124;
const POINTS = 120; // of a line: a point for each second would be a point for each pixel
const NEWEST_S = 10; // a figure that is older is not "the newest", but that of another time

export class Charts {
  constructor(root, timeline) {
    this.timeline = timeline;
    this.cards = CHARTS.map((about) => new ChartCard(about, timeline));
    root.replaceChildren(...this.cards.map((card) => card.element));
    this.cards.forEach((card) => card.build());
  }

  /** After a change of the colours. */
  rebuild() {
    this.cards.forEach((card) => card.build());
  }

  draw() {
    const columns = this.timeline.columns(this.timeline.seconds / POINTS);
    this.cards.forEach((card) => card.draw(columns));
  }
}

/** The value of a series in a column; null if it was not measured there. */
function valueIn({ value, join = mean, bars }, { begin, moments }) {
  if (!moments.length) return null;
  const counted = bars ? moments.filter(({ at }) => at >= begin) : moments;
  const known = counted.map(value).filter((each) => each !== null);
  return known.length || bars ? join(known) : null;
}

class ChartCard {
  constructor(about, timeline) {
    this.about = about;
    this.timeline = timeline;
    this.data = [[], ...about.series.map(() => [])];
    this.values = about.series.map(() => make("b", {}, "–"));
    const legend = about.series.map((series, index) =>
      make(
        "span",
        { class: "item" },
        make("i", { class: "swatch", style: { background: `var(${series.colour})` } }),
        make("span", {}, series.label),
        this.values[index],
      ),
    );
    this.plot = make("div", { class: "plot", "aria-hidden": "true" });
    this.element = make(
      "figure",
      { class: "card chart" },
      make("figcaption", {}, make("h3", {}, about.title), make("span", { class: "unit" }, about.unit)),
      make("div", { class: "legend" }, ...legend),
      this.plot,
    );
    new ResizeObserver(() => this.resize()).observe(this.plot);
  }

  build() {
    this.chart?.destroy();
    this.chart = new uPlot(this.settings(), this.data, this.plot);
  }

  resize() {
    const width = this.plot.clientWidth;
    if (this.chart && width && width !== this.chart.width) this.chart.setSize({ width, height: HEIGHT });
  }

  draw(columns) {
    this.data = [
      columns.map(({ at }) => at),
      ...this.about.series.map((series) => columns.map((column) => valueIn(series, column))),
    ];
    this.chart.setData(this.data);
    this.tell(this.chart.cursor.idx);
  }

  /** Shows the figures of a column in the legend; the newest ones without an index. */
  tell(index) {
    this.about.series.forEach((series, number) => {
      const column = this.data[number + 1];
      const value = index === null || index === undefined ? this.newest(column) : column[index];
      setText(this.values[number], (series.show ?? this.about.show)(value));
    });
  }

  newest(column) {
    const from = this.timeline.range[1] - NEWEST_S;
    return column.findLast((value, index) => value !== null && this.data[0][index] > from);
  }

  settings() {
    const { series, show, top, whole } = this.about;
    const [ink, line, sunk] = [colour("--muted"), colour("--grid"), colour("--sunk")];
    const axis = { stroke: ink, font: "11px system-ui, sans-serif", ticks: { show: false } };
    const grid = { stroke: line, width: 1 };
    const right = series.find((each) => each.scale === "right");
    const y = {
      ...axis, grid, size: 44, gap: 4, space: 32,
      values: (chart, ticks) => ticks.map((tick) => short(show, tick)),
      incrs: whole ? WHOLE : undefined,
    };
    const axes = [
      {
        ...axis, grid: { show: false }, size: 22, gap: 6, space: 56, incrs: TIMES,
        values: (chart, ticks) => ticks.map((tick) => clock(tick, this.timeline.seconds <= 60)),
      },
      y,
    ];
    if (right) {
      axes.push({
        ...y, scale: "right", side: 1, grid: { show: false }, size: 38,
        values: (chart, ticks) => ticks.map((tick) => short(right.show ?? show, tick)),
        incrs: right.whole ? WHOLE : undefined,
      });
    }
    const scales = {
      x: { time: true, range: () => this.timeline.range },
      y: { range: (chart, low, high) => [0, top ?? room(high, whole)] },
    };
    if (right) scales.right = { range: (chart, low, high) => [0, room(high, right.whole)] };
    return {
      width: this.plot.clientWidth || 280,
      height: HEIGHT,
      padding: [8, right ? 0 : 27, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, sync: { key: "console" }, points: { size: 6 } },
      hooks: {
        setCursor: [(chart) => this.tell(chart.cursor.idx)],
        drawClear: [(chart) => shade(chart, idleStretches(this.timeline), sunk, ink)],
      },
      scales,
      axes,
      series: [{}, ...series.map((each) => this.line(each))],
    };
  }

  line({ label, colour: name, scale, fill, bars, width = 1.6 }) {
    const stroke = colour(name);
    return {
      label,
      scale: scale ?? "y",
      stroke,
      width,
      spanGaps: false,
      points: { show: false, size: 2.5 * width, fill: stroke, width: 0, filter: bars ? null : isolated },
      ...(fill && { fill: faded(stroke) }),
      ...(bars && { paths: uPlot.paths.bars({ size: [0.6, 8, 2] }), fill: stroke, width: 0 }),
    };
  }
}

const TIMES = [1, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600];
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4];

/** The top of a scale whose largest value is `high`. */
const room = (high, whole) => Math.max((high ?? 0) * 1.12, whole ? 2 : 1e-3);

/** A tick of an axis: no decimals that say nothing. */
const short = (show, value) =>
  value === 0 ? "0" : show === rate ? count(value) : show(value).replace(/\.0+(?=\D|$)/, "");

/** The values without neighbours, which no line shows: they become dots. */
function isolated(chart, index) {
  const values = chart.data[index];
  const known = (at) => typeof values[at] === "number";
  const found = values.flatMap((value, at) => (known(at) && !known(at - 1) && !known(at + 1) ? [at] : []));
  return found.length ? found : null;
}

/** Shades stretches of time, and names them where there is room. */
function shade(chart, stretches, fill, ink) {
  const { ctx, bbox } = chart;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.font = `${11 * uPlot.pxRatio}px system-ui, sans-serif`;
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  for (const stretch of stretches) {
    const [left, right] = stretch.map((at) => chart.valToPos(at, "x", true));
    ctx.fillStyle = fill;
    ctx.fillRect(left, bbox.top, right - left, bbox.height);
    if (right - left < 1.3 * ctx.measureText(IDLE).width) continue;
    ctx.fillStyle = ink;
    ctx.fillText(IDLE, (left + right) / 2, bbox.top + 10 * uPlot.pxRatio);
  }
  ctx.restore();
}
const IDLE = "idle";

const faded = (value) => value.replace("rgb(", "rgba(").replace(")", ", 0.12)");
