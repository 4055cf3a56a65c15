// The table of requests. Rows keep their elements, so that a focus in the table outlives a frame.

const MAX_ROWS = 200;

const COLUMNS = [
  { name: "Request", key: "id", of: (row, facts) => (facts ? facts.id : "") },
  { name: "State", key: "state", of: (row) => row.state },
  { name: "Prompt", key: "prompt", of: (row, facts) => (facts ? facts.prompt : 0), wide: true },
  { name: "Answer", key: "answer", of: (row) => row.answer },
  { name: "Kept", key: "live", of: (row) => row.live },
  { name: "Evicted", key: "evicted", of: (row) => row.evicted },
  { name: "Blocks", key: "blocks", of: (row) => row.blocks },
  { name: "Floor", key: "floor", of: (row) => row.floor, title: "Blocks that its live tokens need at least", wide: true },
  { name: "Policy", key: "policy", of: (row, facts) => policyOf(facts), wide: true },
];

function policyOf(facts) {
  if (!facts || facts.policy === null) return "keeps all";
  const budget = Number.isInteger(facts.budget) ? facts.budget : `${Math.round(100 * facts.budget)} %`;
  return `${facts.policy}, ${budget}`;
}

class Requests {
  constructor(facts, onOpen) {
    this.states = facts.names.states;
    this.table = document.getElementById("requests");
    this.body = this.table.querySelector("tbody");
    this.onOpen = onOpen;
    this.rows = new Map(); // number -> its elements
    this.order = { column: -1, sign: 1 }; // as frames list them, until a column is chosen
    this.headings = COLUMNS.map((column, i) => {
      const button = make("button", { textContent: column.name, title: column.title || `Sort by ${column.name.toLowerCase()}` });
      button.addEventListener("click", () => this.sortBy(i));
      const heading = make("th", { scope: "col", className: column.wide ? "wide" : "" }, button);
      heading.setAttribute("aria-sort", "none");
      return heading;
    });
    this.table.querySelector("thead tr").replaceChildren(...this.headings);
  }

  sortBy(column) {
    const again = this.order.column === column;
    this.order = { column, sign: again ? -this.order.sign : column < 2 ? 1 : -1 };
    this.headings.forEach((heading, i) => {
      const way = this.order.sign > 0 ? "ascending" : "descending";
      heading.setAttribute("aria-sort", i === column ? way : "none");
    });
    if (this.frame) this.draw(this.frame, this.facts, this.chosen);
  }

  draw(frame, facts, chosen) {
    [this.frame, this.facts, this.chosen] = [frame, facts, chosen];
    const sorted = this.sorted(frame, facts), shown = sorted.slice(0, MAX_ROWS);
    const wanted = new Set(shown.map((row) => row.number));
    for (const [number, parts] of this.rows) {
      if (!wanted.has(number)) {
        parts.row.remove();
        this.rows.delete(number);
      }
    }
    shown.forEach((row, place) => {
      const parts = this.rows.get(row.number) || this.makeRow(row.number);
      this.fill(parts, row, facts.get(row.number));
      parts.row.setAttribute("aria-selected", String(row.number === chosen));
      this.place(parts.row, place);
    });
    const [running, waiting, preempted] = frame.requests;
    const rest = sorted.length - shown.length + Math.max(0, waiting - frame.rows.filter((row) => row.state === 0).length);
    setText(
      document.getElementById("requests-summary"),
      `${running} running, ${waiting} waiting, ${preempted} preempted${rest ? `; ${rest} more not shown` : ""}`,
    );
    document.getElementById("requests-none").hidden = shown.length > 0;
    this.table.hidden = shown.length === 0;
  }

  sorted(frame, facts) {
    if (this.order.column < 0) return frame.rows;
    const { of } = COLUMNS[this.order.column], value = (row) => of(row, facts.get(row.number));
    const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b) : a - b);
    return [...frame.rows].sort((a, b) => this.order.sign * compare(value(a), value(b)) || a.number - b.number);
  }

  makeRow(number) {
    const open = make("button"), chip = make("span", { className: "chip" });
    open.addEventListener("click", () => this.onOpen(number));
    chip.style.background = colours.owners[ownerOf(number)];
    const cells = COLUMNS.map((column, i) => make("td", { className: column.wide ? "wide" : "" }, ...(i ? [] : [chip, open])));
    const bar = make("i"), share = make("span", { className: "share wide" }, bar), kept = make("span");
    cells[4].append(kept, share);
    const parts = { row: make("tr", {}, ...cells), cells, open, chip, kept, share, bar };
    this.rows.set(number, parts);
    return parts;
  }

  fill(parts, row, facts) {
    const { cells, open, kept, share, bar } = parts;
    COLUMNS.forEach((column, i) => {
      const value = column.of(row, facts);
      if (i === 0) setText(open, value);
      else if (i === 1) setText(cells[1], this.states[value]);
      else setText(i === 4 ? kept : cells[i], typeof value === "number" ? show(value) : value);
    });
    const total = row.live + row.evicted;
    share.title = total ? `${Math.round((100 * row.live) / total)} % of its tokens are kept` : "";
    bar.style.width = `${total ? (100 * row.live) / total : 0}%`;
  }

  // Elements that are in their place are not touched: moving one takes the focus from it.
  place(row, place) {
    const there = this.body.children[place];
    if (there === row) return;
    const focused = row.contains(document.activeElement) ? document.activeElement : null;
    this.body.insertBefore(row, there || null);
    if (focused) focused.focus({ preventScroll: true });
  }

  recolour() {
    for (const [number, parts] of this.rows) parts.chip.style.background = colours.owners[ownerOf(number)];
  }
}
