// The decision log: what was decided about winning blocks back, and what came of it.

const MAX_DECISIONS = 60;
const WHY = {
  pressure: "blocks were short",
  eviction: "tokens were evicted",
  fragmentation: "holes had grown",
  place: "its budget was reached",
};

class Events {
  constructor() {
    this.list = document.getElementById("events");
    this.all = document.getElementById("all-decisions");
    this.all.addEventListener("change", () => this.frames && this.draw(this.frames, this.shown, this.facts));
  }

  draw(frames, shown, facts) {
    [this.frames, this.shown, this.facts] = [frames, shown, facts];
    const decisions = this.latest(frames, shown);
    // Nothing new, nothing touched.
    const mark = decisions.map((events) => `${events[0].decision}:${events.length}`).join();
    if (mark !== this.mark) {
      this.mark = mark;
      this.list.replaceChildren(...decisions.map((events) => this.item(events)));
    }
    document.getElementById("events-none").hidden = decisions.length > 0;
    this.list.hidden = decisions.length === 0;
  }

  // Their events together, the latest decision first, up to the frame that is shown.
  latest(frames, shown) {
    const found = new Map();
    for (let i = shown; i >= 0 && found.size < 4 * MAX_DECISIONS; i--) {
      for (const event of [...frames[i].events].reverse()) {
        if (!found.has(event.decision)) found.set(event.decision, []);
        found.get(event.decision).unshift(event);
      }
    }
    const decisions = [...found.values()].sort((a, b) => b[0].decision - a[0].decision);
    const gained = (events) => events.some((event) => event.phase !== "plan") || events[0].blocks > 0;
    return (this.all.checked ? decisions : decisions.filter(gained)).slice(0, MAX_DECISIONS);
  }

  item(events) {
    const item = make("li"), [first] = events;
    item.append(make("span", { className: "dim", textContent: `step ${first.step}` }));
    let copied = 0, returned = 0, dropped = 0;
    const owners = new Set();
    for (const event of events) {
      if (event.phase === "copy") copied += event.tokens;
      if (event.phase === "return") returned += event.blocks;
      if (event.phase === "drop") dropped += 1;
      if (event.number !== undefined && this.facts.has(event.number)) owners.add(this.facts.get(event.number).id);
    }
    if (first.phase === "plan") {
      const cost = first.tokens ? ` for ${count(first.tokens, "copy", "copies")}` : "";
      const gain = first.blocks ? `${count(first.blocks, "block")}${cost}` : first.verdict === "too_dear" ? "too dear" : "no gain";
      item.append(phase("plan", gain));
    }
    if (copied) item.append(phase("copy", count(copied, "token")));
    if (events.some((event) => event.phase === "return")) item.append(phase("return", count(returned, "block")));
    if (dropped) item.append(phase("drop", "its sequence had gone"));
    const why = first.trigger ? WHY[first.trigger] || first.trigger : "";
    const of = [...owners].slice(0, 3).join(", ");
    item.append(make("span", { className: "why", textContent: [of, why].filter(Boolean).join(": ") }));
    return item;
  }
}

function phase(name, text) {
  const element = make("span", { className: "phase", textContent: `${name} ${text}` });
  element.dataset.phase = name;
  return element;
}
