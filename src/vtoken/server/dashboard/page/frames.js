// Frames as the server sends them, and the last minutes of them.

const KEPT_SECONDS = 300;
const NOBODY = 0xffff, PUBLISHED = 1, PINNED = 2;

function bytesOf(base64) {
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

// A block is three words, see BLOCK in memory/block_map.py.
function wordsOf(base64) {
  const bytes = bytesOf(base64), words = new Uint32Array(bytes.length / 4), view = new DataView(bytes.buffer);
  for (let i = 0; i < words.length; i++) words[i] = view.getUint32(4 * i, true);
  return words;
}

function blockAt(cells, i) {
  const b = cells[3 * i + 1], c = cells[3 * i + 2];
  const flags = c >>> 24, refs = (c >>> 16) & 0xff;
  const state = refs ? "held" : flags & PUBLISHED ? "cached" : flags & PINNED ? "pinned" : "free";
  return { mask: cells[3 * i], owner: b & 0xffff, live: b >>> 16, used: c & 0xffff, refs, flags, state };
}

class History {
  constructor(names) {
    this.names = names;
    this.frames = [];
    this.facts = new Map(); // of requests, by number
    this.index = -1; // of the frame that `cells` shows
    this.cells = null;
    this.viewed = null;
  }

  get last() { return this.frames[this.frames.length - 1]; }

  // Returns how many frames went at the other end, or -1 for a frame that cannot be used.
  add(frame) {
    if (!frame.key && (!this.last || frame.n !== this.last.n + 1)) return -1;
    for (const values of frame.facts) this.facts.set(values[0], zip(this.names.facts, values));
    frame.facts = null;
    frame.events = frame.events.map((values) => zip(this.names.events, values));
    if (frame.events.length) {
      const { ofLane } = this.table(frame.rows);
      for (const event of frame.events) event.number = ofLane.get(event.lane);
    }
    frame.numbers = frame.rows.map((values) => values[0]);
    frame.rows = JSON.stringify(frame.rows); // a tenth of what it takes as objects
    frame.blocks = frame.blocks.all
      ? { all: wordsOf(frame.blocks.all) }
      : { at: wordsOf(frame.blocks.at), cells: wordsOf(frame.blocks.cells) };
    this.frames.push(frame);
    frame.rates = this.ratesAt(this.frames.length - 1);
    return this.trim();
  }

  table(rows) {
    const named = rows.map((values) => zip(this.names.rows, values)), ofLane = new Map();
    for (const row of named) for (const lane of row.lanes) ofLane.set(lane, row.number);
    return { rows: named, ofLane };
  }

  // A frame with its table of requests unfolded: `rows`, and `ofLane`, which request a lane belongs to.
  view(index) {
    const frame = this.frames[index];
    if (!this.viewed || this.viewed.n !== frame.n) this.viewed = { ...frame, ...this.table(JSON.parse(frame.rows)) };
    return this.viewed;
  }

  // What happened a second, over the last second or two before a frame.
  ratesAt(index) {
    const now = this.frames[index];
    let before = now;
    for (let i = index; i >= 0 && now.time - before.time < 1.5; i--) before = this.frames[i];
    const seconds = Math.max(0.2, now.time - before.time);
    const grown = (name) => now.totals[name] - before.totals[name];
    const steps = now.step - before.step;
    return {
      tokens: grown("generated") / seconds,
      evicted: grown("evicted") / seconds,
      returned: grown("returned") / seconds,
      preempted: grown("preempted") / seconds,
      step: steps > 0 ? (1000 * grown("busy")) / steps : 0,
    };
  }

  trim() {
    let gone = 0;
    while (this.last.time - this.frames[0].time > KEPT_SECONDS) {
      const next = this.frames.findIndex((frame, i) => i > 0 && frame.key);
      if (next < 0) break;
      this.frames.splice(0, next);
      gone += next;
    }
    if (gone) {
      this.index -= gone;
      if (this.index < 0) this.cells = null;
      const kept = new Set();
      for (const frame of this.frames) for (const number of frame.numbers) kept.add(number);
      for (const number of this.facts.keys()) if (!kept.has(number)) this.facts.delete(number);
    }
    return gone;
  }

  // Brings `cells` to a frame. Returns the blocks that changed, or null for all of them.
  seek(index) {
    let first = index;
    while (!this.frames[first].blocks.all) first--;
    let changed = null;
    if (this.cells && this.index >= first && this.index <= index) {
      changed = new Set();
    } else {
      this.cells = this.frames[first].blocks.all.slice();
      this.index = first;
    }
    while (this.index < index) {
      const { all, at, cells } = this.frames[++this.index].blocks;
      if (all) {
        for (let i = 0; 3 * i < all.length; i++) this.put(i, all, i, changed);
      } else {
        for (let j = 0; j < at.length; j++) this.put(at[j], cells, j, changed);
      }
    }
    return changed;
  }

  put(i, from, j, changed) {
    const to = this.cells;
    if (to[3 * i] === from[3 * j] && to[3 * i + 1] === from[3 * j + 1] && to[3 * i + 2] === from[3 * j + 2]) return;
    to.set(from.subarray(3 * j, 3 * j + 3), 3 * i);
    if (changed) changed.add(i);
  }
}

function zip(names, values) {
  const found = {};
  names.forEach((name, i) => { found[name] = values[i]; });
  return found;
}

// Elements are made by hand, and texts of others are set as text: nothing that comes from a request is ever markup.
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const fine = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
function show(value) { return (Math.abs(value) < 10 ? fine : plain).format(value); }
function count(value, one, many = one + "s") { return `${plain.format(value)} ${value === 1 ? one : many}`; }
