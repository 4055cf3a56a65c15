// The tokens of one request, as they were in the frame that is shown: when a token died is known for each.

const SHADES = 5;

class Tokens {
  constructor(ask, onClose) {
    this.ask = ask; // (number, choice, start) -> the server's answer, or null for a request that is gone
    this.panel = document.getElementById("tokens-panel");
    this.box = document.getElementById("tokens");
    this.choice = document.getElementById("choice");
    this.earlier = document.getElementById("earlier");
    this.number = null;
    this.spans = [];
    document.getElementById("close-tokens").addEventListener("click", onClose);
    this.choice.addEventListener("change", () => this.load(this.number, Number(this.choice.value)));
    this.earlier.addEventListener("click", () => {
      this.start = Math.max(0, this.answer.start - this.answer.text.length);
      this.load(this.number, this.answer.choice, this.start);
    });
  }

  async open(number) {
    this.number = number;
    this.start = null;
    this.answer = null;
    this.panel.hidden = false;
    this.box.replaceChildren();
    this.spans = [];
    await this.load(number, 0);
    if (this.number === number) {
      this.panel.scrollIntoView({ block: "nearest" });
      this.panel.focus({ preventScroll: true });
    }
  }

  close() {
    this.number = null;
    this.answer = null;
    this.panel.hidden = true;
  }

  async refresh() {
    if (this.number !== null && this.answer && this.answer.state !== "finished") {
      await this.load(this.number, this.answer.choice, this.start);
    }
  }

  async load(number, choice, start = null) {
    const answer = await this.ask(number, choice, start);
    if (this.number !== number) return; // another one was opened meanwhile
    if (!answer) {
      if (!this.answer) setText(document.getElementById("tokens-facts"), "This request ended too long ago to be looked at.");
      else this.answer.state = "finished";
      return;
    }
    const same = this.answer && this.answer.choice === answer.choice && this.answer.start === answer.start;
    this.answer = answer;
    if (!same) {
      this.box.replaceChildren();
      this.spans = [];
    }
    this.draw(this.frame, this.facts);
  }

  draw(frame, facts) {
    [this.frame, this.facts] = [frame, facts];
    const answer = this.answer;
    if (!answer || !frame) return;
    const row = frame.rows.find((each) => each.number === answer.number);
    // Tokens that the books knew in this frame; of several choices together nobody can tell, so those are as of now.
    const isTold = row && answer.choices === 1;
    const computed = isTold ? row.live + row.evicted : row ? answer.length : 0;
    const known = isTold ? answer.prompt + row.answer : row ? answer.length : 0;
    const holds = row && (row.lanes.length > 0 || row.state === 3 || row.state === 4);
    while (this.spans.length < answer.text.length) {
      const i = this.spans.length, span = make("span", { textContent: visible(answer.text[i]) });
      this.spans.push(span);
      this.box.append(span);
    }
    const safe = new Set(answer.protected);
    let live = 0, dead = 0;
    this.spans.forEach((span, i) => {
      const position = answer.start + i, died = answer.died[i];
      const isDead = died > 0 && died <= computed, isThere = holds && position < computed;
      span.hidden = position >= known;
      if (!span.hidden && isDead) dead++;
      else if (!span.hidden && isThere) live++;
      const kind = isDead ? " dead" : isThere ? "" : " todo";
      const name = "t" + kind + (position === answer.prompt ? " first" : "");
      if (span.className !== name) span.className = name;
      setData(span, "rank", kind ? null : String(shadeOf(answer, i, position, computed)));
      setData(span, "safe", !kind && safe.has(position) ? "" : null);
      span.title = titleOf(answer, i, position, isDead, isThere);
    });
    this.head(row, facts.get(answer.number), live, dead);
  }

  head(row, facts, live, dead) {
    const answer = this.answer, only = answer.start > 0 || answer.text.length < answer.length;
    setText(document.getElementById("tokens-title"), `Tokens of ${answer.id}`);
    const where = only ? `positions ${answer.start} to ${answer.start + answer.text.length - 1} of ${answer.length}: ` : "";
    const state = row ? "" : "not there in this frame; ";
    setText(
      document.getElementById("tokens-facts"),
      `${state}${where}${plain.format(live)} kept, ${plain.format(dead)} evicted; ${policyOf(facts)}`,
    );
    const scored = answer.rank.some((rank) => rank !== null);
    setText(
      document.getElementById("shade-means"),
      scored ? `score of ${answer.policy}, as of now: the lowest die first` : "age: no policy has scored them",
    );
    this.earlier.hidden = answer.start === 0;
    document.getElementById("choice-label").hidden = answer.choices < 2;
    if (this.choice.options.length !== answer.choices) {
      const options = Array.from({ length: answer.choices }, (_, i) => make("option", { value: String(i), textContent: String(i) }));
      this.choice.replaceChildren(...options);
    }
    this.choice.value = String(answer.choice);
  }
}

// Spaces stay what they are; what cannot be seen gets a sign.
function visible(text) {
  if (text === "") return "∅";
  return text.replaceAll("\r", "␍").replaceAll("\n", "↵\n").replaceAll("\t", "⇥");
}

function shadeOf(answer, i, position, computed) {
  const rank = answer.rank[i];
  if (rank !== null) return Math.min(SHADES - 1, Math.floor(rank * SHADES));
  if (answer.rank.some((each) => each !== null)) return 0;
  return Math.min(SHADES - 1, Math.floor((SHADES * position) / Math.max(1, computed)));
}

function titleOf(answer, i, position, isDead, isThere) {
  if (isDead) return `position ${position}: evicted when the text had ${answer.died[i]} tokens`;
  if (!isThere) return `position ${position}: not in memory`;
  const rank = answer.rank[i];
  const score = rank === null ? "" : `; ${Math.round(100 * rank)} % of the way from the first to die to the last`;
  return `position ${position}: live${score}`;
}

function setData(element, name, value) {
  if (value === null) delete element.dataset[name];
  else if (element.dataset[name] !== value) element.dataset[name] = value;
}
