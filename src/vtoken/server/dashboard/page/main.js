// Ties the parts together: asks the server, keeps the frames, draws the one that is shown.

const at = (id) => document.getElementById(id);
let facts = null, history = null, parts = null;
let shown = -1; // index of the frame that is drawn
let paused = false, chosen = null, drawn = null, isDue = false, run = null;

// --- the server -----------------------------------------------------------------------------------------------------

let key = remembered() || "";

function remembered() {
  try {
    return sessionStorage.getItem("vtoken-key");
  } catch {
    return null; // a browser that keeps nothing; it will be asked for again
  }
}

function remember(text) {
  key = text;
  try {
    sessionStorage.setItem("vtoken-key", text);
  } catch { /* as above */ }
}

async function ask(path, signal) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const response = await fetch(new URL(`dashboard/${path}`, location.href), { headers, signal, cache: "no-store" });
  if (response.status === 401 || response.status === 403) {
    remember("");
    at("key-form").hidden = false;
    at("key").focus();
    throw new Refused();
  }
  if (response.status === 204) return null; // it has gone
  if (!response.ok) throw new Error(`the server answered ${response.status}`);
  return response;
}

class Refused extends Error {}

async function askTokens(number, choice, start) {
  if (!history || !history.last || !history.last.numbers.includes(number)) return null; // it has gone
  try {
    const response = await ask(`requests/${number}?choice=${choice}${start === null ? "" : `&start=${start}`}`);
    return response && (await response.json());
  } catch {
    return null; // what there was stays; the stream tells that the server cannot be reached
  }
}

async function begin() {
  const response = await ask("state");
  if (!response) throw new Error("there is no dashboard here");
  facts = (await response.json()).facts;
  at("key-form").hidden = true;
  setText(at("title"), facts.title);
  history = new History(facts.names);
  if (!parts) {
    parts = {
      blocks: new BlockMap(facts, open),
      lines: new Lines(seekTime),
      requests: new Requests(facts, open),
      tokens: new Tokens(askTokens, close),
      events: new Events(),
    };
  } else if (parts.blocks.num !== facts.num_blocks || parts.blocks.size !== facts.block_size) {
    location.reload(); // another engine than before
  }
  parts.blocks.facts = history.facts;
  [shown, drawn, run] = [-1, null, null];
}

// Reads frames until the server ends the stream, as it does now and then, and asks again for what came since.
async function follow() {
  let wait = 500;
  for (;;) {
    try {
      if (!history) await begin();
      const since = history.last ? history.last.n + 1 : 0;
      const response = await ask(`stream?since=${since}`);
      if (!response) throw new Error("there is no dashboard here");
      say("");
      wait = 500;
      const ended = await read(response.body.pipeThrough(new TextDecoderStream()).getReader());
      if (ended) {
        say(`No more frames: ${ended}.`, true);
        await sleep(3000);
        history = null;
      }
    } catch (error) {
      if (error instanceof Refused) return; // goes on when there is a key
      say("The server cannot be reached; trying again.", true);
      await sleep(wait);
      wait = Math.min(10_000, 2 * wait);
    }
  }
}

async function read(reader) {
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return null;
    const messages = (rest + value).split("\n\n");
    rest = messages.pop();
    for (const message of messages) {
      const lines = message.split("\n"), data = lines.find((line) => line.startsWith("data: "));
      if (!data) continue;
      const content = JSON.parse(data.slice(6));
      if (lines.includes("event: end")) return content;
      if (!take(content)) {
        await reader.cancel();
        return null;
      }
    }
  }
}

// Returns false for frames of another server, which took the place of the one before.
function take(frame) {
  if (run !== null && frame.run !== run) {
    history = null;
    return false;
  }
  run = frame.run;
  const gone = history.add(frame);
  if (gone < 0) return true; // it leans on one that was missed; a key frame comes soon
  if (paused) shown = Math.max(0, shown - gone);
  else shown = history.frames.length - 1;
  if (drawn !== null) drawn -= gone;
  draw();
  return true;
}

function sleep(milliseconds) { return new Promise((resolve) => setTimeout(resolve, milliseconds)); }

function say(text, isBad = false) {
  setText(at("status"), text);
  if (isBad) at("status").dataset.bad = "";
  else delete at("status").dataset.bad;
}

// --- drawing --------------------------------------------------------------------------------------------------------

function draw() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    if (history && history.last) drawNow();
  });
}

function drawNow() {
  const started = performance.now(), frame = history.view(shown), { blocks, lines, requests, tokens, events } = parts;
  if (drawn !== shown) {
    const changed = history.seek(shown);
    // After a jump nothing has "just" come back; a frame or two may be left out where drawing is slow.
    const isNext = drawn !== null && drawn >= 0 && shown > drawn && shown - drawn <= 3;
    blocks.draw(history.cells, frame, changed, isNext);
    drawn = shown;
  }
  requests.draw(frame, history.facts, chosen);
  tokens.draw(frame, history.facts);
  events.draw(history.frames, shown, history.facts);
  lines.draw(history.frames, shown);
  drawTiles(frame);
  drawPlayer(frame);
  performance.clearMeasures("vtoken-frame"); // the last one is there for who wants to know
  performance.measure("vtoken-frame", { start: started, end: performance.now() });
}

function drawTiles(frame) {
  const { usage, totals, rates } = frame, held = usage.held_blocks + usage.pinned_blocks;
  const [running, waiting, preempted] = frame.requests;
  const tiles = [
    ["pool in use", `${Math.round((100 * held) / usage.num_blocks)} %`, ""],
    ["tokens a second", show(rates.tokens), ""],
    ["requests running", show(running), waiting + preempted ? `${show(waiting + preempted)} waiting` : ""],
    ["live tokens", show(usage.live_tokens), ""],
    ["holes", show(usage.holes), "cells"],
    ["tokens evicted", show(totals.evicted), ""],
    ["blocks returned", show(totals.returned), totals.packed ? `${show(totals.packed)} packed` : ""],
    ["preemptions", show(totals.preempted), ""],
  ];
  const list = at("tiles");
  if (!list.children.length) {
    for (const [name] of tiles) {
      list.append(make("div", {}, make("dd", {}, make("span"), " ", make("small")), make("dt", { textContent: name })));
    }
  }
  tiles.forEach(([, value, more], i) => {
    setText(list.children[i].querySelector("span"), value);
    setText(list.children[i].querySelector("small"), more);
  });
  const { num_blocks, free_blocks, held_blocks, cached_blocks, shared_blocks } = usage;
  setText(
    at("blocks-summary"),
    `${count(num_blocks, "block")} of ${facts.block_size} tokens: ${show(held_blocks)} held (${show(shared_blocks)} shared), ` +
      `${show(cached_blocks)} cached, ${show(free_blocks)} free`,
  );
}

function drawPlayer(frame) {
  const slider = at("slider"), last = history.frames.length - 1, ago = history.last.time - frame.time;
  slider.max = String(last);
  slider.value = String(shown);
  const clock = new Date(1000 * frame.time).toLocaleTimeString("en-GB");
  const text = paused ? `${clock}, ${fine.format(ago)} s ago` : `${clock}, live`;
  slider.setAttribute("aria-valuetext", text);
  setText(at("when"), text);
  setText(at("pause"), paused ? "Go on" : "Pause");
  at("pause").setAttribute("aria-pressed", String(paused));
  at("back").disabled = shown === 0;
  at("forward").disabled = shown === last;
  at("live").disabled = !paused;
}

// --- what people do -------------------------------------------------------------------------------------------------

function go(index) {
  if (!history || !history.last) return;
  paused = true;
  shown = Math.max(0, Math.min(history.frames.length - 1, index));
  draw();
}

function seekTime(time) {
  const { frames } = history, later = frames.findIndex((frame) => frame.time >= time);
  go(later < 0 ? frames.length - 1 : later);
}

function setPaused(value) {
  if (!history || !history.last) return;
  paused = value;
  if (!paused) shown = history.frames.length - 1;
  draw();
}

function open(number) {
  chosen = number;
  parts.blocks.choose(number);
  parts.tokens.open(number);
  draw();
}

function close() {
  const button = parts.requests.rows.get(chosen);
  chosen = null;
  parts.tokens.close();
  parts.blocks.choose(null);
  (button ? button.open : at("blocks")).focus({ preventScroll: true });
  draw();
}

at("pause").addEventListener("click", () => setPaused(!paused));
at("live").addEventListener("click", () => setPaused(false));
at("back").addEventListener("click", () => go(shown - 1));
at("forward").addEventListener("click", () => go(shown + 1));
at("slider").addEventListener("input", (event) => go(Number(event.target.value)));
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  remember(at("key").value);
  at("key").value = "";
  follow();
});

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  const { target } = event;
  if (event.key === "Escape" && chosen !== null) close();
  else if (target.closest("input, select, textarea, [role=application]")) return;
  else if (event.key === " " && !target.closest("button")) setPaused(!paused);
  else if (target.closest(".scroll") && !target.closest("button")) return; // arrows scroll it
  else if (event.key === "ArrowLeft") go(shown - 1);
  else if (event.key === "ArrowRight") go(shown + 1);
  else if (event.key === "End") setPaused(false);
  else return;
  event.preventDefault();
});

function relayout() {
  if (!parts) return;
  colours = readColours();
  parts.blocks.layout();
  parts.blocks.drawLegend();
  parts.blocks.redraw();
  parts.requests.recolour();
  draw();
}

let width = 0;
new ResizeObserver(() => {
  if (at("blocks").clientWidth !== width) { // the height is of our own making
    width = at("blocks").clientWidth;
    relayout();
  }
}).observe(at("blocks-panel"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", relayout);
// Of the request that is open, new tokens and scores; not of what is past.
setInterval(() => { if (parts && !paused && !document.hidden) parts.tokens.refresh(); }, 1000);

follow();
