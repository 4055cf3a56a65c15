// Colours of the style sheet, for what is drawn on canvases.

const NUM_OWNERS = 8;
let colours = readColours();

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue("--" + name).trim();
  const found = {};
  for (const name of ["surface", "ink", "dim", "line", "accent", "free", "cached", "hole"]) found[name] = of(name);
  found.owners = Array.from({ length: NUM_OWNERS }, (_, i) => of("o" + i));
  found.tints = found.owners.map((colour) => mixed(colour, found.surface, 0.24));
  found.areas = found.owners.map((colour) => mixed(colour, found.surface, 0.2));
  return found;
}

// "#rrggbb" twice: `share` of the first, the rest of the second.
function mixed(one, other, share) {
  const channel = (colour, i) => parseInt(colour.slice(1 + 2 * i, 3 + 2 * i), 16);
  const sums = [0, 1, 2].map((i) => Math.round(share * channel(one, i) + (1 - share) * channel(other, i)));
  return `rgb(${sums.join(",")})`;
}

function ownerOf(number) { return number % NUM_OWNERS; }

// A canvas as sharp as the screen; returns its context, in pixels of the page.
function sharp(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== wide || canvas.height !== high) [canvas.width, canvas.height] = [wide, high];
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}
