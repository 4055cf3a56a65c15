// The pool: each block a cell, coloured by owner, filled by its live slots.

const LARGEST_CELL = 60, LEAST_FOR_SLOTS = 15, FLASH_FRAMES = 4;

// One cell. `cell` is as of blockAt, `owner` the index of a colour, `size` the slots of a block.
function drawCell(context, x, y, side, size, cell, owner, { faint = false, flash = false, marked = false } = {}) {
  const inner = side - (side >= 5 ? 1 : side >= 3 ? 0.5 : 0);
  context.globalAlpha = 1;
  context.fillStyle = colours.surface;
  context.fillRect(x, y, side, side);
  context.globalAlpha = faint ? 0.3 : 1;
  if (cell.state === "held") {
    context.fillStyle = colours.tints[owner];
    context.fillRect(x, y, inner, inner);
    if (inner >= LEAST_FOR_SLOTS - 1 && size <= 32) drawSlots(context, x, y, inner, size, cell, colours.owners[owner]);
    else drawFill(context, x, y, inner, size, cell, colours.owners[owner]);
    if (cell.refs > 1) drawCorner(context, x, y, inner);
  } else {
    context.fillStyle = cell.state === "cached" ? colours.cached : colours.free;
    context.fillRect(x, y, inner, inner);
  }
  if (cell.flags & PINNED) drawFrame(context, x, y, inner, colours.ink);
  context.globalAlpha = 1;
  if (flash) drawFrame(context, x, y, inner, colours.owners[2]);
  if (marked) drawFrame(context, x, y, inner, colours.accent);
}

function drawFill(context, x, y, inner, size, cell, colour) {
  const live = cell.live ? Math.max(1, Math.round((inner * cell.live) / size)) : 0;
  const used = Math.round((inner * cell.used) / size);
  context.fillStyle = colour;
  context.fillRect(x, y + inner - live, inner, live);
  const holes = cell.used > cell.live ? Math.max(1, used - live) : 0;
  if (!holes) return;
  context.fillStyle = colours.hole;
  const alpha = context.globalAlpha;
  context.globalAlpha = alpha * 0.5;
  context.fillRect(x, Math.max(y, y + inner - live - holes), inner, Math.min(holes, inner - live));
  context.globalAlpha = alpha;
}

function drawSlots(context, x, y, inner, size, cell, colour) {
  const columns = size > 16 ? 8 : Math.ceil(Math.sqrt(size)), rows = Math.ceil(size / columns);
  const gap = inner >= 26 ? 1.5 : 1, pad = 1.5;
  const wide = (inner - 2 * pad + gap) / columns, high = (inner - 2 * pad + gap) / rows;
  for (let slot = 0; slot < Math.min(size, cell.used); slot++) {
    const left = x + pad + (slot % columns) * wide, top = y + pad + Math.floor(slot / columns) * high;
    if ((cell.mask >>> slot) & 1) {
      context.fillStyle = colour;
      context.fillRect(left, top, wide - gap, high - gap);
    } else if (slot < cell.used) {
      context.fillStyle = colours.hole;
      context.fillRect(left + (wide - gap) / 2 - 1, top + (high - gap) / 2 - 1, 2, 2);
    }
  }
}

function drawCorner(context, x, y, inner) {
  const length = Math.max(2, inner / 3);
  context.fillStyle = colours.ink;
  context.beginPath();
  context.moveTo(x + inner - length, y);
  context.lineTo(x + inner, y);
  context.lineTo(x + inner, y + length);
  context.fill();
}

function drawFrame(context, x, y, inner, colour) {
  const thick = inner >= 12 ? 2 : 1;
  context.strokeStyle = colour;
  context.lineWidth = thick;
  context.strokeRect(x + thick / 2, y + thick / 2, inner - thick, inner - thick);
}

function isHeld(cells, i) { return (cells[3 * i + 2] & 0xff0000) !== 0; }

class BlockMap {
  constructor(facts, onOpen) {
    this.canvas = document.getElementById("blocks");
    this.inspector = document.getElementById("inspector");
    this.size = facts.block_size;
    this.num = facts.num_blocks;
    this.onOpen = onOpen;
    this.cursor = -1; // the block that the keyboard or the mouse is at
    this.flashes = new Map(); // block -> frames for which it is still marked as returned
    this.chosen = null; // number of a request that stands out
    this.layout();
    this.drawLegend();
    this.canvas.addEventListener("pointermove", (event) => this.moveTo(this.blockUnder(event)));
    this.canvas.addEventListener("click", (event) => { this.moveTo(this.blockUnder(event)); this.open(); });
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
    this.canvas.addEventListener("focus", () => { if (this.cursor < 0) this.moveTo(0); });
  }

  layout() {
    const width = this.canvas.clientWidth, most = width < 500 ? 560 : 430;
    // As few columns as the height allows, so that cells are as large as they can be; then as many as there is room for.
    let columns = Math.max(1, Math.ceil(width / LARGEST_CELL));
    const sideOf = () => (columns <= width ? Math.floor(width / columns) : width / columns);
    while (Math.ceil(this.num / columns) * sideOf() > most) columns++;
    this.side = sideOf();
    this.columns = Math.floor(width / this.side + 1e-6);
    this.height = Math.ceil(this.num / this.columns) * this.side;
    this.canvas.style.height = this.height + "px";
    this.context = sharp(this.canvas, width, this.height);
    this.context.fillStyle = colours.surface;
    this.context.fillRect(0, 0, width, this.height);
  }

  // `changed`: as of History.seek. `isNext`: the frame follows the one that was drawn before.
  draw(cells, frame, changed, isNext) {
    this.cells = cells;
    this.frame = frame;
    const numbers = changed === null || !isNext ? null : changed;
    if (numbers === null) this.flashes.clear();
    else {
      for (const [i, left] of this.flashes) {
        if (left > 1) this.flashes.set(i, left - 1);
        else this.flashes.delete(i);
        numbers.add(i);
      }
      for (const i of numbers) {
        if (isHeld(cells, i)) this.flashes.delete(i);
        else if (this.wasHeld[i]) this.flashes.set(i, FLASH_FRAMES);
      }
    }
    if (numbers === null) for (let i = 0; i < this.num; i++) this.drawOne(i);
    else for (const i of numbers) this.drawOne(i);
    if (!this.wasHeld) this.wasHeld = new Uint8Array(this.num);
    for (let i = 0; i < this.num; i++) this.wasHeld[i] = isHeld(cells, i);
    if (this.cursor >= 0) this.inspect();
  }

  redraw() { if (this.cells) this.draw(this.cells, this.frame, null, false); }

  drawOne(i) {
    const cell = blockAt(this.cells, i), number = this.frame.ofLane.get(cell.owner);
    const x = (i % this.columns) * this.side, y = Math.floor(i / this.columns) * this.side;
    drawCell(this.context, x, y, this.side, this.size, cell, number === undefined ? 0 : ownerOf(number), {
      faint: this.chosen !== null && number !== this.chosen,
      flash: this.flashes.has(i),
      marked: i === this.cursor,
    });
  }

  choose(number) {
    this.chosen = number;
    this.redraw();
  }

  blockUnder(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.side);
    const block = Math.floor((event.clientY - box.top) / this.side) * this.columns + column;
    return column < this.columns && block < this.num ? block : -1;
  }

  moveTo(block) {
    if (block < 0 || block >= this.num || block === this.cursor) return;
    const before = this.cursor;
    this.cursor = block;
    if (!this.cells) return;
    if (before >= 0) this.drawOne(before);
    this.drawOne(block);
    this.inspect();
  }

  onKey(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns };
    const places = { Home: 0, End: this.num - 1 };
    if (event.key in steps) this.moveTo(this.cursor + steps[event.key]);
    else if (event.key in places) this.moveTo(places[event.key]);
    else if (event.key === "Enter") this.open();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  open() {
    if (this.cursor < 0 || !this.cells) return;
    const number = this.frame.ofLane.get(blockAt(this.cells, this.cursor).owner);
    if (number !== undefined) this.onOpen(number);
  }

  inspect() { setText(this.inspector, this.describe(this.cursor)); }

  describe(i) {
    const cell = blockAt(this.cells, i), known = cell.flags & PUBLISHED ? ", in the prefix index" : "";
    const pinned = cell.flags & PINNED ? ", pinned by a copy under way" : "";
    if (cell.state === "free") return `Block ${i}: free.`;
    if (cell.state === "cached") return `Block ${i}: cached, held by nobody; given up when blocks are short${pinned}.`;
    if (cell.state === "pinned") return `Block ${i}: held by nobody${pinned}.`;
    const lanes = this.frame.ofLane, number = lanes.get(cell.owner);
    const facts = number === undefined ? null : this.facts.get(number);
    const owner = facts ? `request ${facts.id}` : "a sequence";
    const shared = cell.refs > 1 ? ` and shared by ${cell.refs} sequences` : "";
    const holes = cell.used - cell.live, room = this.size - cell.used;
    return `Block ${i}: held by ${owner}${shared}; ${cell.live} of ${this.size} slots live, ` +
      `${count(holes, "hole")}, ${room} not used yet${known}${pinned}.`;
  }

  drawLegend() {
    const list = document.getElementById("legend"), size = 16, full = 0xffff;
    const held = { mask: full, owner: 0, live: 16, used: 16, refs: 1, flags: 0, state: "held" };
    const entries = [
      ["live tokens", held],
      ["holes: evicted", { ...held, mask: 0x1241, live: 4 }],
      ["room for new ones", { ...held, mask: 0x1f, live: 5, used: 5 }],
      ["shared", { ...held, refs: 2 }],
      ["pinned by a copy", { ...held, flags: PINNED }],
      ["cached prefix", { ...held, state: "cached" }],
      ["free", { ...held, state: "free" }],
      ["just returned", { ...held, state: "free" }, { flash: true }],
    ];
    const items = entries.map(([text, cell, options]) => {
      const canvas = make("canvas", { ariaHidden: "true" });
      // As large as the cells are drawn, so that it shows what is to be seen.
      const side = Math.max(13, Math.min(18, this.side));
      const context = sharp(canvas, 18, 18);
      drawCell(context, (18 - side) / 2, (18 - side) / 2, side, size, cell, 0, options);
      return make("li", {}, canvas, text);
    });
    list.replaceChildren(...items);
  }
}
