// What happened over the last minutes, one small chart a question.

const LEAST_SPAN = 20; // seconds

const CHARTS = [
  {
    name: "Pool in use",
    unit: "%",
    most: 100,
    // Stacked: what is held, and the cached blocks above it.
    series: [
      { colour: 0, at: (f) => (100 * (f.usage.held_blocks + f.usage.pinned_blocks)) / f.usage.num_blocks },
      {
        colour: null,
        at: (f) => (100 * (f.usage.held_blocks + f.usage.pinned_blocks + f.usage.cached_blocks)) / f.usage.num_blocks,
      },
    ],
  },
  { name: "Tokens generated", unit: " / s", series: [{ colour: 2, at: (f) => f.rates.tokens }] },
  { name: "Tokens evicted", unit: " / s", series: [{ colour: 3, at: (f) => f.rates.evicted }] },
  { name: "Blocks returned", unit: " / s", series: [{ colour: 2, at: (f) => f.rates.returned }] },
  { name: "Preemptions", unit: " / s", series: [{ colour: 5, at: (f) => f.rates.preempted }] },
  { name: "A step takes", unit: " ms", series: [{ colour: 1, at: (f) => f.rates.step }] },
  {
    name: "To the first token",
    unit: " ms",
    dots: true,
    series: [{ colour: 7, at: (f) => (f.first.length ? (1000 * f.first.reduce((a, b) => a + b)) / f.first.length : NaN) }],
  },
];

class Lines {
  constructor(onSeek) {
    this.charts = CHARTS.map((chart) => {
      const value = make("b"), canvas = make("canvas");
      canvas.setAttribute("role", "img");
      canvas.addEventListener("click", (event) => {
        const box = canvas.getBoundingClientRect();
        onSeek(this.start + (this.end - this.start) * ((event.clientX - box.left) / box.width));
      });
      const element = make("div", { className: "line" }, make("span", { textContent: chart.name }), value, canvas);
      document.getElementById("lines").append(element);
      return { ...chart, value, canvas };
    });
  }

  draw(frames, shown) {
    this.end = frames[frames.length - 1].time;
    this.start = Math.max(this.end - KEPT_SECONDS, Math.min(frames[0].time, this.end - LEAST_SPAN));
    const span = this.end - this.start;
    setText(document.getElementById("span"), span > 90 ? `${Math.round(span / 60)} minutes` : `${Math.round(span)} seconds`);
    for (const chart of this.charts) this.drawChart(chart, frames, frames[shown]);
  }

  drawChart(chart, frames, shown) {
    const { canvas } = chart, width = canvas.clientWidth, height = canvas.clientHeight;
    const context = sharp(canvas, width, height);
    context.clearRect(0, 0, width, height);
    const drawn = chart.series.map(({ at }) => frames.map(at));
    const top = chart.most || roundUp(Math.max(0, ...drawn.flat().filter((v) => !Number.isNaN(v))));
    const x = (frame) => ((frame.time - this.start) / (this.end - this.start)) * (width - 2);
    const y = (value) => height - 1 - (value / top) * (height - 12);
    context.fillStyle = colours.line;
    context.fillRect(0, height - 1, width, 1);
    // The widest first, so that each lies before what it is part of.
    for (let i = chart.series.length - 1; i >= 0; i--) {
      const { colour } = chart.series[i], values = drawn[i];
      const line = colour === null ? colours.cached : colours.owners[colour];
      if (chart.dots) drawDots(context, frames, values, x, y, line);
      else drawArea(context, frames, values, x, y, height, line, colour === null ? colours.cached : colours.areas[colour]);
    }
    const at = x(shown);
    context.fillStyle = colours.ink;
    context.fillRect(Math.min(at, width - 1), 0, 1, height);
    context.fillStyle = colours.dim;
    context.font = "10px system-ui, sans-serif";
    context.textBaseline = "top";
    context.fillText(withUnit(top, chart.unit), 2, 0);
    const now = chart.series[0].at(chart.dots ? latestWith(frames, shown) : shown);
    const text = Number.isNaN(now) ? "–" : withUnit(now, chart.unit);
    setText(chart.value, text);
    canvas.setAttribute("aria-label", `${chart.name}: ${text}; the top is ${withUnit(top, chart.unit)}`);
  }
}

function withUnit(value, unit) {
  return unit === " ms" && value >= 1000 ? `${fine.format(value / 1000)} s` : show(value) + unit;
}

function latestWith(frames, shown) {
  let found = shown;
  for (const frame of frames) {
    if (frame.n > shown.n) break;
    if (frame.first.length) found = frame;
  }
  return found;
}

function drawArea(context, frames, values, x, y, height, line, area) {
  context.beginPath();
  frames.forEach((frame, i) => (i ? context.lineTo(x(frame), y(values[i])) : context.moveTo(x(frame), y(values[i]))));
  context.strokeStyle = line;
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.stroke();
  context.lineTo(x(frames[frames.length - 1]), height - 1);
  context.lineTo(x(frames[0]), height - 1);
  context.fillStyle = area;
  context.globalAlpha = 0.7;
  context.fill();
  context.globalAlpha = 1;
}

function drawDots(context, frames, values, x, y, colour) {
  context.fillStyle = colour;
  frames.forEach((frame, i) => {
    if (!Number.isNaN(values[i])) context.fillRect(x(frame) - 1.5, y(values[i]) - 1.5, 3, 3);
  });
}

// 1, 2 or 5 times a power of ten.
function roundUp(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= value);
}
