// One page about the plans of one graph. `told` is what document.py wrote; the first plan is what the page is about.
const names = Object.keys(told.plans), heads = Object.values(told.plans);
const MOST_FOUND = 400; // rows that a search shows

// ---- words

const inTime = (s) => (s < 1e-12 ? "0" : unit(s, [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]]));
const short = (op) => op.split(".")[1] ?? op;
const meshText = (mesh) => Object.entries(mesh).map(([name, size]) => `${name}=${size}`).join(" ");
const sizeOf = (plan, axes) => axes.reduce((product, axis) => product * heads[plan].atoms[axis], 1);
const sharers = (plan) => sizeOf(plan, Object.keys(heads[plan].atoms)); // devices, or those of a stage
const slices = (plan, tensor) => `(${tensor.cuts.map((axes) => sizeOf(plan, axes)).join(",")})`;
const strategy = (plan, way) => {
  const side = (tensors) => tensors.map((tensor) => slices(plan, tensor)).join(" ") || "-";
  return `${side(way.operands)} → ${side(way.results)}`;
};

// ---- the head

// The answers are those of the page of text; what is held, and the numbers of stages, are drawn below them.
const answered = (head) => head.answers.filter(([question]) => !["memory", "why so many stages"].includes(question)).map(([question, text], at, all) =>
  element("p", {}, element("b", {}, at && all[at - 1][0] === question ? "" : question), element("span", {}, text)));
function showHead() {
  $("title").textContent = told.title;
  $("answers").replaceChildren(...answered(heads[0]));
  $("answers-beside").replaceChildren(...(other ? [element("h3", {}, `Beside it: ${names[other]}`), ...answered(heads[other])] : []));
  $("search").replaceChildren(...heads[0].considered.map((line) => element("p", {}, line)));
}

const KINDS = {
  parameters: "parameters", gradients: "gradients", optimizer: "states of the optimizer",
  activations: "kept for the backward", buffers: "buffers", recomputed: "computed again",
};

// What is drawn as a bar each: a plan, of the first one the groups of ranks of its pipeline stages.
function holders(head, plan) {
  if (plan || !head.stages.length) return [[names[plan], head.held_bytes]];
  const groups = Array.from({ length: head.schedule.groups }, (_, group) => head.stages.flatMap((stage, i) => (stage.group === group ? [i] : [])));
  return groups.map((stages) => [`stage ${stages.join(", ")}`, head.stages[stages[0]].held_bytes]);
}
function showHeld() {
  const kinds = [...new Set(heads.flatMap((head) => Object.keys(head.held_bytes)))].filter((kind) => kind !== "total");
  const limit = heads[0].memory ?? 0;
  const most = Math.max(limit, ...heads.map((head) => head.held_bytes.total)) * 1.02 || 1;
  const rows = heads.flatMap((head, plan) => holders(head, plan)).map(([label, held]) => {
    const bar = element("div", { className: "bar", role: "img" });
    kinds.forEach((kind, i) => {
      const bytes = held[kind] ?? 0;
      if (!bytes) return;
      const part = element("span", { title: `${KINDS[kind] ?? kind}: ${inBytes(bytes)}` });
      part.style.cssText = `width:${(100 * bytes) / most}%;background:${colour(i)}`;
      bar.append(part);
    });
    if (limit) {
      const line = element("i", { className: "limit", title: `may hold ${inBytes(limit)}` });
      line.style.left = `${(100 * limit) / most}%`;
      bar.append(line);
    }
    bar.setAttribute("aria-label", kinds.map((kind) => `${KINDS[kind] ?? kind} ${inBytes(held[kind] ?? 0)}`).join(", "));
    return element("div", { className: "held-row" }, element("span", {}, label), bar,
      element("span", {}, inBytes(held.total)));
  });
  const legend = element("p", { className: "legend" });
  kinds.forEach((kind, i) => {
    if (!heads.some((head) => head.held_bytes[kind])) return;
    const key = element("i");
    key.style.background = colour(i);
    legend.append(element("span", {}, key, ` ${KINDS[kind] ?? kind} ${inBytes(heads[0].held_bytes[kind] ?? 0)}`), " ");
  });
  const alive = heads[0].peak_bytes === null ? "The keys say what the fullest device holds."
    : `At most ${inBytes(heads[0].peak_bytes)} are alive at once, in the ${heads[0].peak_at}.`;
  $("held").replaceChildren(...rows, legend, element("p", { className: "said" },
    alive + (limit ? ` A device may hold ${inBytes(limit)}.` : "")));
}

// ---- the tree: rows are made when they are to be seen

const ops = told.operators.map((op, place) => ({ ...op, place, isOp: true }));
let other = 0; // the plan that stands beside the first; 0 where none does
let order = null; // [how a row is measured, descending]
const open = new Set();

const noTotals = () => names.map(() => ({ computes: 0, communicates: 0, sent: 0, held: 0 }));
function addTotals(into, totals) {
  into.forEach((sum, plan) => Object.keys(sum).forEach((key) => { sum[key] += totals[plan][key]; }));
}
function prepare(module, parent, id) {
  Object.assign(module, { parent, id, totals: noTotals(), at: Infinity });
  module.totals.forEach((sum, plan) => { sum.held = module.held_bytes[plan]; });
  module.own = module.operators.map((place) => ops[place]);
  for (const op of module.own) {
    op.parent = module;
    op.id = `${id}#${op.place}`;
    op.totals = op.ways.map((way) => ({ computes: way.computes_s, communicates: way.communicates_s, sent: way.sent_bytes, held: 0 }));
    addTotals(module.totals, op.totals);
  }
  module.children.forEach((child, i) => { prepare(child, module, `${id}.${i}`); addTotals(module.totals, child.totals); });
}
prepare(told.root, null, "m");
open.add(told.root.id);

const differs = (row) => other > 0 && (row.isOp
  ? strategy(0, row.ways[0]) !== strategy(other, row.ways[other])
  : row.own.some(differs) || row.children.some(differs));
const inside = (row) => (row.isOp ? [] : [...row.children, ...row.own]);
function sorted(rows) {
  return order ? [...rows].sort((a, b) => order.sign * (order.of(a) - order.of(b))) : rows;
}
function textOf(row) {
  if (row.text) return row.text;
  const parts = row.isOp
    ? [row.name, row.op, row.module, row.line, strategy(0, row.ways[0]), ...row.ways[0].moved.flatMap((moved) => [...moved.kinds, ...moved.axes, moved.cause])]
    : [row.name];
  return (row.text = parts.join(" ").toLowerCase());
}

function visible() {
  const words = $("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  const only = $("differing").checked && other > 0;
  const rows = [];
  if (words.length) {
    const walk = (row, path) => {
      const all = path + textOf(row);
      if (row.isOp && words.every((word) => all.includes(word)) && (!only || differs(row))) rows.push([row, 0]);
      sorted(inside(row)).forEach((child) => walk(child, `${path}${row.isOp ? "" : row.name} `.toLowerCase()));
    };
    walk(told.root, "");
    return [rows.slice(0, MOST_FOUND), rows.length];
  }
  const walk = (row, depth) => {
    if (only && !differs(row)) return;
    rows.push([row, depth]);
    if (open.has(row.id)) sorted(inside(row)).forEach((child) => walk(child, depth + 1));
  };
  walk(told.root, 0);
  return [rows, rows.length];
}

const COLUMNS = [
  ["module or operator", null], ["strategy", null], ["computes", "computes"], ["communicates", "communicates"],
  ["sends", "sent"], ["holds", "held"],
];
function showColumns() {
  const cells = [];
  for (const [title, key] of COLUMNS) {
    const plans = key || title === "strategy" ? (other ? [0, other] : [0]) : [0];
    for (const plan of plans) {
      const text = plan ? `${title}, ${names[plan]}` : title;
      const cell = element("th", { className: key ? "number" : "", scope: "col" });
      if (!key) { cell.textContent = text; cells.push(cell); continue; }
      const is = order && order.key === key && order.plan === plan;
      cell.setAttribute("aria-sort", is ? (order.sign < 0 ? "descending" : "ascending") : "none");
      cell.append(element("button", { type: "button", title: "sort", onclick: () => sortBy(key, plan) },
        text + (is ? (order.sign < 0 ? " ▼" : " ▲") : "")));
      cells.push(cell);
    }
  }
  $("columns").replaceChildren(...cells);
}
function sortBy(key, plan) {
  const same = order && order.key === key && order.plan === plan;
  order = same && order.sign > 0 ? null
    : { key, plan, sign: same ? 1 : -1, of: (row) => row.totals[plan][key] };
  showRows();
}

let chosen = null;
function showRows() {
  showColumns();
  const [rows, all] = visible();
  $("rows").replaceChildren(...rows.map(([row, depth]) => rowOf(row, depth)));
  const searching = $("find").value.trim() !== "";
  $("found").textContent = searching
    ? `${all} operator${all === 1 ? "" : "s"} found${all > rows.length ? `, the first ${rows.length} shown` : ""}` : "";
  if (![...$("rows").children].some((row) => row.tabIndex === 0) && $("rows").firstChild) $("rows").firstChild.tabIndex = 0;
}
function rowOf(row, depth) {
  const searching = $("find").value.trim() !== "";
  const made = element("tr", { className: row.isOp ? "operator" : "module", tabIndex: chosen === row.id ? 0 : -1 });
  made.dataset.id = row.id;
  made.setAttribute("aria-level", depth + 1);
  if (!row.isOp) made.setAttribute("aria-expanded", open.has(row.id));
  if (chosen === row.id) made.classList.add("chosen");
  if (differs(row)) made.classList.add("differs");
  const mark = row.isOp || inside(row).length === 0 ? "" : open.has(row.id) ? "▾" : "▸";
  const times = row.isOp ? row.times : row.count;
  const where = searching ? `${row.module} · ` : "";
  const name = element("span", { className: "name" }, element("span", { className: "fold" }, mark), where,
    row.isOp ? element("span", { className: "code" }, short(row.op)) : row.name);
  if (times > 1) name.append(element("span", { className: "times" }, ` × ${times}`));
  name.style.paddingLeft = `${depth * 1.1}em`;
  const cells = [element("td", {}, name)];
  const plans = other ? [0, other] : [0];
  for (const plan of plans) {
    cells.push(element("td", {}, row.isOp ? tiles(plan, row.ways[plan]) : ""));
  }
  for (const [, key] of COLUMNS.slice(2)) {
    for (const plan of plans) {
      const number = row.totals[plan][key], whole = told.root.totals[plan][key];
      const text = number === 0 ? "" : key === "sent" || key === "held" ? inBytes(number) : inTime(number);
      const cell = element("td", { className: "number" }, text);
      if (!other && (key === "computes" || key === "communicates")) {
        const share = element("span", { className: "share" }), part = element("i");
        const step = heads[plan].step_s || 1;
        part.style.cssText = `width:${Math.min(100, (100 * number) / step)}%;background:var(--${key})`;
        share.append(part);
        cell.append(share);
        cell.title = `${((100 * number) / step).toFixed(1)} % of a step`;
      } else if (whole) cell.title = `${((100 * number) / whole).toFixed(1)} % of all`;
      cells.push(cell);
    }
  }
  made.append(...cells);
  return made;
}
// The strategy as the page of text has it, before it each operand and result as a tile with its cuts.
function tiles(plan, way) {
  const cell = element("span", { className: "code" });
  const tensors = [...way.operands, null, ...way.results];
  if (tensors.length < 9) {
    const picture = drawn("svg", { width: tensors.length * 22, height: 18, "aria-hidden": "true" });
    tensors.forEach((tensor, i) => {
      if (tensor === null) picture.append(drawn("text", { x: i * 22 + 4, y: 14 }, "→"));
      else tile(picture, plan, tensor, i * 22 + 1, 1, 16, 16, 4);
    });
    picture.style.cssText = "vertical-align:-4px;margin-right:0.6em";
    cell.append(picture);
  }
  cell.append(strategy(plan, way));
  return cell;
}
// A tensor: its last two dims down and to the right, filled where a device holds it, crossed where it is a summand.
function tile(picture, plan, tensor, x, y, width, height, most) {
  const cuts = tensor.cuts.map((axes) => sizeOf(plan, axes));
  if (cuts.length < 2) { y += height * 0.35; height *= 0.3; } // a line of numbers, or a single one
  if (cuts.length < 1) { x += width * 0.35; width *= 0.3; }
  const right = cuts[cuts.length - 1] ?? 1, down = cuts.length > 1 ? cuts[cuts.length - 2] : 1;
  const deep = cuts.slice(0, -2).reduce((product, cut) => product * cut, 1);
  const step = (count) => Math.min(count, most);
  picture.append(drawn("rect", { x, y, width: width / step(right), height: height / step(down), fill: "var(--one)",
    opacity: deep > 1 ? 0.45 : 0.8 }));
  for (let i = 1; i < step(right); i++) picture.append(drawn("line", { class: "cut", x1: x + (width * i) / step(right), x2: x + (width * i) / step(right), y1: y, y2: y + height, "stroke-width": 0.6 }));
  for (let i = 1; i < step(down); i++) picture.append(drawn("line", { class: "cut", y1: y + (height * i) / step(down), y2: y + (height * i) / step(down), x1: x, x2: x + width, "stroke-width": 0.6 }));
  if (tensor.partial.length) picture.append(drawn("line", { class: "cut", x1: x, y1: y, x2: x + width, y2: y + height, "stroke-width": 1.2 }));
  picture.append(drawn("rect", { class: "edge", x, y, width, height }));
}

function find(id) {
  const walk = (row) => (row.id === id ? row : inside(row).reduce((found, child) => found ?? (id.startsWith(child.id) ? walk(child) : undefined), undefined));
  return walk(told.root);
}
function choose(row, { scroll = false, toggle = false } = {}) {
  chosen = row.id;
  if (toggle && !row.isOp) open.has(row.id) ? open.delete(row.id) : open.add(row.id);
  showRows();
  const shown = $("rows").querySelector(`[data-id="${CSS.escape(row.id)}"]`);
  shown?.focus({ preventScroll: !scroll });
  if (scroll) shown?.scrollIntoView({ block: "center" });
  showDetail(row);
}
$("rows").addEventListener("click", (event) => {
  const row = event.target.closest("tr");
  if (row) choose(find(row.dataset.id), { toggle: true });
});
$("rows").addEventListener("keydown", (event) => {
  const at = event.target.closest("tr");
  if (!at) return;
  const row = find(at.dataset.id), move = { ArrowDown: at.nextSibling, ArrowUp: at.previousSibling, Home: $("rows").firstChild, End: $("rows").lastChild }[event.key];
  if (move) choose(find(move.dataset.id), { scroll: false });
  else if (event.key === "ArrowRight" && !row.isOp && !open.has(row.id)) choose(row, { toggle: true });
  else if (event.key === "ArrowLeft" && !row.isOp && open.has(row.id)) choose(row, { toggle: true });
  else if (event.key === "ArrowLeft" && row.parent) choose(row.parent);
  else if (event.key === "Enter" || event.key === " ") choose(row, { toggle: true });
  else return;
  event.preventDefault();
});
const modules = (row, into = []) => { if (!row.isOp) { into.push(row); row.children.forEach((child) => modules(child, into)); } return into; };
$("unfold").onclick = () => { modules(told.root).forEach((row) => open.add(row.id)); showRows(); };
$("fold").onclick = () => { open.clear(); open.add(told.root.id); showRows(); };
$("find").oninput = showRows;
$("differing").onchange = showRows;

// ---- one row in detail

function showDetail(row) {
  $("detail-section").hidden = !row.isOp;
  if (!row.isOp) return;
  $("detail-head").textContent = `${short(row.op)} in ${row.module}${row.times > 1 ? `, ${row.times} times` : ""}`;
  const ways = element("div", { className: "ways" });
  for (const plan of other ? [0, other] : [0]) {
    const way = row.ways[plan], box = element("div");
    if (other) box.append(element("h3", {}, names[plan]));
    box.append(element("p", {}, `${strategy(plan, way)}: shared by ${way.parts} of ${sharers(plan)} devices${heads[plan].stages.length ? " of its stage" : ""}; computes ${inTime(way.computes_s)}, communicates ${inTime(way.communicates_s)}.`));
    const pictures = element("div", { className: "tensors" });
    way.operands.forEach((tensor) => pictures.append(figure(plan, tensor, "operand")));
    way.results.forEach((tensor) => pictures.append(figure(plan, tensor, "result")));
    box.append(pictures, element("h3", {}, "Who holds which part of the result"));
    if (way.results.length) box.append(devices(plan, way.results[0]));
    if (way.moved.length) {
      const table = element("table", {}, element("tr", {}, ...["collectives", "axes", "of", "sent", "takes"].map((text) => element("th", {}, text))));
      way.moved.forEach((moved) => table.append(element("tr", {}, ...[moved.kinds.join(", "), moved.axes.join("·"), moved.cause, inBytes(moved.bytes), inTime(moved.seconds)].map((text) => element("td", {}, text)))));
      box.append(element("h3", {}, row.times > 1 ? "What is communicated for one of them" : "What is communicated"), table);
    }
    ways.append(box);
  }
  const why = told.whys[row.place] ?? "Asked for are the operators that take longest; `shardwright plan --explain` tells of any.";
  $("detail").replaceChildren(element("p", { className: "code" }, `${row.name}: ${row.op}, ${row.line}`), ways,
    element("h3", {}, "Why"), element("p", { className: "why" }, why));
}
function figure(plan, tensor, what) {
  const picture = drawn("svg", { width: 92, height: 92, role: "img", "aria-label": `${tensor.label} ${slices(plan, tensor)}` });
  tile(picture, plan, tensor, 1, 1, 90, 90, 32);
  const cut = tensor.cuts.map((axes, dim) => (axes.length ? `dim ${dim} over ${axes.join("·")}` : "")).filter(Boolean);
  const partial = tensor.partial.length ? [`summands over ${tensor.partial.join("·")}`] : [];
  return element("figure", {}, picture, element("figcaption", {}, `${what} ${tensor.label} [${tensor.shape.join(", ")}]: ${[...cut, ...partial].join(", ") || "whole"}`));
}
// Devices in rows of the last axes, coloured alike where they hold the same part.
function devices(plan, tensor) {
  const axes = Object.entries(heads[plan].atoms), count = sharers(plan);
  const inner = axes.slice(1).reduce((product, [, size]) => product * size, 1);
  const across = inner > 1 && inner <= 64 ? inner : Math.min(count, 32);
  const cell = Math.max(6, Math.min(18, 640 / across)), rows = Math.ceil(Math.min(count, 2048) / across);
  const picture = drawn("svg", { width: across * cell + 2, height: rows * cell + 2, role: "img", "aria-label": "devices" });
  const used = new Set([...tensor.cuts.flat()]);
  const parts = [...used].reduce((product, axis) => product * heads[plan].atoms[axis], 1);
  for (let device = 0; device < Math.min(count, 2048); device++) {
    let rest = device, part = 0, stride = 1;
    for (const [name, size] of [...axes].reverse()) {
      if (used.has(name)) { part += (rest % size) * stride; stride *= size; }
      rest = Math.floor(rest / size);
    }
    const box = drawn("rect", { x: (device % across) * cell + 1, y: Math.floor(device / across) * cell + 1, width: cell - 1, height: cell - 1,
      fill: `hsl(${(part * 360) / Math.max(parts, 1)} 55% 55%)` });
    box.append(drawn("title", {}, `device ${device}: part ${part + 1} of ${parts}`));
    picture.append(box);
  }
  return picture;
}

// ---- the time line

const canvas = $("line");
const lines = told.events.map((events) =>
  events.map(([lane, place, start, ns]) => ({ lane, place, start: start * 1e-9, end: (start + ns) * 1e-9 })));
// The times at which nothing is computed: what is communicated then is waited for.
const waits = lines.map((events) => {
  let at = 0;
  const end = endOf(events);
  const found = [];
  for (const event of [...events.filter((each) => each.lane % 2 === 0), { start: end, end }]) {
    if (event.start > at + 1e-9) found.push({ start: at, end: event.start });
    at = Math.max(at, event.end);
  }
  return found;
});
function endOf(events) {
  return events.reduce((last, event) => Math.max(last, event.end), 0);
}
let shown = 0, from = 0, to = 1, over = null;
const lengthOf = () => (told.schedules[shown].length ? heads[shown].step_s : endOf(lines[shown])) || 1;
function drawLine() {
  const staged = told.schedules[shown].length > 0;
  canvas.hidden = staged;
  $("schedule").hidden = !staged;
  if (staged) return drawSchedule(told.schedules[shown]);
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name);
  pen.scale(scale, scale);
  pen.fillStyle = of("--paper");
  pen.fillRect(0, 0, width, height);
  const whole = lengthOf(), x = (s) => ((s / whole - from) / (to - from)) * width;
  const back = lines[shown].find((event) => event.lane > 1)?.start ?? whole;
  pen.fillStyle = of("--raised");
  pen.fillRect(x(back), 0, width - x(back), height);
  let last = [-1, -1]; // a pixel of a lane is filled once
  for (const event of lines[shown]) {
    const lane = event.lane % 2, left = x(event.start), right = x(event.end);
    if (right < 0 || left > width || Math.floor(right) <= last[lane]) continue;
    last[lane] = Math.floor(right) - (right - left > 1 ? 0 : 1) ;
    pen.fillStyle = event === over ? of("--ink") : of(lane ? "--communicates" : "--computes");
    pen.globalAlpha = lane && event !== over ? 0.4 : 1;
    pen.fillRect(left, lane ? 66 : 24, Math.max(right - left - (right - left > 3 ? 0.5 : 0), 0.6), 32);
  }
  pen.globalAlpha = 1;
  pen.fillStyle = of("--communicates");
  for (const wait of waits[shown]) {
    const left = x(wait.start), right = x(wait.end);
    if (right >= 0 && left <= width) pen.fillRect(left, 66, Math.max(right - left, 0.6), 32);
  }
  pen.fillStyle = of("--faint");
  pen.font = "11px system-ui";
  pen.fillText("computes", 4, 18);
  pen.fillText("communicates", 4, 112);
  pen.fillText("forward", Math.max(90, Math.min(x(back) - 50, width - 60)), 112);
  if (x(back) < width - 60) pen.fillText("backward", Math.max(150, x(back) + 6), 112);
  pen.textAlign = "right";
  pen.fillText(`${inTime(from * whole)} to ${inTime(to * whole)}`, width - 4, 14);
  pen.textAlign = "left";
}
function zoom(factor, at = 0.5) {
  const middle = from + (to - from) * at, span = Math.min(1, Math.max(1e-4, (to - from) * factor));
  from = Math.max(0, Math.min(1 - span, middle - span * at));
  to = from + span;
  drawLine();
}
function move(part) {
  const span = to - from;
  from = Math.max(0, Math.min(1 - span, from + span * part));
  to = from + span;
  drawLine();
}
function eventAt(x, y) {
  const at = (from + (x / canvas.clientWidth) * (to - from)) * lengthOf(), lane = y > 61 ? 1 : 0;
  const near = ((to - from) * lengthOf() * 2) / canvas.clientWidth;
  const found = lines[shown].filter((event) => event.lane % 2 === lane && event.start - near <= at && at <= event.end + near);
  return found.find((event) => event.start <= at && at <= event.end) ?? found[0] ?? null;
}
canvas.onmousemove = (event) => {
  over = eventAt(event.offsetX, event.offsetY);
  $("line-said").textContent = over ? sayEvent(over) : "";
  drawLine();
};
canvas.onmouseleave = () => { over = null; drawLine(); };
const sayEvent = (event) => {
  const op = ops[event.place], what = event.lane % 2 ? "communicates" : "computes";
  const where = op ? `${short(op.op)} in ${op.module}` : "the outputs";
  return `${event.lane > 1 ? "backward" : "forward"}: ${where} ${what} ${inTime(event.end - event.start)}`;
};
canvas.onclick = (event) => {
  const found = eventAt(event.offsetX, event.offsetY), op = found && ops[found.place];
  if (!op) return;
  $("find").value = "";
  for (let row = op.parent; row; row = row.parent) open.add(row.id);
  choose(op, { scroll: true });
};
for (const picture of [canvas, $("schedule")]) {
  picture.onwheel = (event) => {
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, (event.clientX - picture.getBoundingClientRect().left) / picture.clientWidth);
  };
  picture.onkeydown = (event) => {
    const act = { "+": () => zoom(0.5), "-": () => zoom(2), ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2) }[event.key];
    if (act) { act(); event.preventDefault(); }
  };
}
$("closer").onclick = () => zoom(0.5);
$("farther").onclick = () => zoom(2);
$("all").onclick = () => { from = 0; to = 1; drawLine(); };

// ---- pipeline stages: a row for each group of ranks, a bar for each action of a microbatch

const LEFT = 56, BOTTOM = 22, SHADES = [1, 0.65, 0.85, 0.5];
const WORDS = { forward: "forward", backward: "backward", weights: "gradients of weights" };
const kindsOf = (groups) => [...new Set(groups.flat().map(([kind]) => kind))];
const rowOfGroup = (groups) => Math.max(8, Math.min(26, 560 / groups.length));
let marked = null; // a microbatch
function drawSchedule(groups) {
  const width = $("schedule").clientWidth || 900, high = rowOfGroup(groups), height = groups.length * high + BOTTOM;
  const whole = lengthOf(), room = width - LEFT, kinds = kindsOf(groups), end = heads[shown].schedule.line_s;
  const x = (s) => LEFT + ((s / whole - from) / (to - from)) * room;
  const picture = drawn("svg", { width, height, "aria-hidden": "true" });
  const paths = new Map(), numbers = [];
  groups.forEach((group, row) => {
    for (const [kind, , microbatch, start, ns] of group) {
      const left = Math.max(LEFT, x(start * 1e-9)), right = Math.min(width, x((start + ns) * 1e-9));
      if (right <= left) continue;
      const key = `${kinds.indexOf(kind)} ${microbatch}`, top = row * high + 1;
      const wide = Math.max(right - left - (right - left > 4 ? 1 : 0), 0.5);
      paths.set(key, `${paths.get(key) ?? ""}M${left.toFixed(1)} ${top}h${wide.toFixed(1)}v${high - 2}h${(-wide).toFixed(1)}z`);
      if (wide > 7 + 7 * String(microbatch).length && high > 12) numbers.push(drawn("text", { x: left + wide / 2, y: top + high / 2 + 3, "text-anchor": "middle", class: "number" }, microbatch));
    }
  });
  for (const [key, d] of paths) {
    const [kind, microbatch] = key.split(" ").map(Number);
    const faint = marked !== null && marked !== microbatch;
    picture.append(drawn("path", { d, fill: `var(${COLOURS[kind]})`, opacity: SHADES[microbatch % SHADES.length] * (faint ? 0.25 : 1) }));
  }
  if (x(whole) > x(end) && x(end) < width) {
    const rest = drawn("rect", { x: Math.max(LEFT, x(end)), y: 1, width: Math.max(0, Math.min(width, x(whole)) - Math.max(LEFT, x(end))), height: groups.length * high - 2, fill: "var(--seven)" });
    picture.append(rest);
  }
  picture.append(drawn("rect", { x: 0, y: 0, width: LEFT - 2, height, fill: "var(--paper)" }), ...numbers);
  groups.forEach((_, row) => (high > 10 || row % 4 === 0) && picture.append(drawn("text", { x: LEFT - 8, y: row * high + high / 2 + 4, "text-anchor": "end" }, `pp=${row}`)));
  for (let i = 0; i <= 4; i++) picture.append(drawn("text", { x: LEFT + (room * i) / 4, y: height - 6, "text-anchor": ["start", "middle", "middle", "middle", "end"][i] }, inTime((from + ((to - from) * i) / 4) * whole)));
  $("schedule").replaceChildren(picture);
}
function actionAt(x, y) {
  const groups = told.schedules[shown], row = groups[Math.floor(y / rowOfGroup(groups))];
  const at = (from + ((x - LEFT) / ($("schedule").clientWidth - LEFT)) * (to - from)) * lengthOf() * 1e9;
  return x > LEFT && row ? row.find(([, , , start, ns]) => start <= at && at <= start + ns) ?? null : null;
}
const atPointer = (event) => {
  const box = $("schedule").getBoundingClientRect();
  return actionAt(event.clientX - box.left, event.clientY - box.top);
};
$("schedule").onmousemove = (event) => {
  const found = atPointer(event), before = marked;
  marked = found && found[2];
  $("line-said").textContent = found ? `${WORDS[found[0]] ?? found[0]} of microbatch ${found[2]} in stage ${found[1]}: ${inTime(found[4] * 1e-9)}, from ${inTime(found[3] * 1e-9)} on` : "";
  if (marked !== before) drawLine();
};
$("schedule").onmouseleave = () => { marked = null; drawLine(); };
$("schedule").onclick = (event) => { const found = atPointer(event); if (found) showStage(found[1]); };
function showStage(stage) {
  const row = told.root.children.find((child) => child.name === `stage ${stage}`);
  if (!row || shown !== 0) return;
  $("find").value = "";
  open.add(row.id);
  choose(row, { scroll: true });
}
function showKeys() {
  const groups = told.schedules[shown];
  if (!groups.length) return $("line-keys").replaceChildren(...lineKeys);
  const keys = kindsOf(groups).map((kind, i) => [WORDS[kind] ?? kind, COLOURS[i]]);
  $("line-keys").replaceChildren(...[...keys, ["gradients summed, parameters updated", "--seven"]].flatMap(([text, name]) => {
    const key = element("i");
    key.style.background = `var(${name})`;
    return [key, ` ${text}`];
  }));
}
const lineKeys = [...$("line-keys").childNodes];
function showStages() {
  const { stages, tried_stages: tried } = heads[0];
  $("stages-section").hidden = !stages.length && !tried.length;
  const most = Math.max(...stages.map((stage) => stage.forward_s + stage.backward_s));
  const head = ["stage", "ranks", "modules", "operators", "forward", "backward", "both", "to the next", "each holds"];
  const rows = stages.map((stage, i) => {
    const both = stage.forward_s + stage.backward_s, share = element("span", { className: "share" }), part = element("i");
    part.style.cssText = `width:${(100 * both) / most}%;background:var(--computes)`;
    share.append(part);
    const cells = [element("button", { type: "button", title: "show its operators", onclick: () => showStage(i) }, `stage ${i}`),
      `pp=${stage.group}`, stage.modules.join(", "), stage.operators, inTime(stage.forward_s), inTime(stage.backward_s), inTime(both),
      stage.message_s ? inTime(stage.message_s) : "-", inBytes(stage.held_bytes.total)];
    const row = element("tr", {}, ...cells.map((cell, at) => element("td", { className: at > 2 ? "number" : "" }, cell)));
    row.children[6].append(share);
    return row;
  });
  $("stages").replaceChildren(element("tr", {}, ...head.map((text, at) => element("th", { className: at > 2 ? "number" : "" }, text))), ...rows);
  $("stages").parentNode.hidden = $("model-said").hidden = !stages.length;
  const longest = Math.max(...tried.map((each) => each.step_s ?? 0)) || 1;
  const now = stages.length ? heads[0].schedule.groups : 1;
  const bars = tried.map((each) => {
    const bar = element("div", { className: "bar" }), part = element("span");
    part.style.cssText = `width:${(100 * (each.step_s ?? 0)) / longest}%;background:var(${each.stages === now ? "--computes" : "--seven"})`;
    bar.append(part);
    const name = each.stages === 1 ? "without stages" : `pp=${each.stages}${each.microbatches ? `, ${each.microbatches} microbatches` : ""}`;
    return element("div", { className: "held-row" }, element("span", {}, name), each.step_s === null ? element("span", { className: "said" }, each.why) : bar,
      element("span", {}, each.step_s === null ? "-" : `${each.is_bound ? "at least " : ""}${inTime(each.step_s)}`));
  });
  $("tried").replaceChildren(...(bars.length ? [element("h3", {}, "Numbers of stages that were tried: a step takes"), ...bars] : []));
}

// ---- several plans

const others = names.slice(1);
for (const id of ["beside-label", "differing-label", "line-of-label"]) $(id).hidden = others.length === 0;
$("beside").append(element("option", { value: 0 }, "nothing"), ...others.map((name, i) => element("option", { value: i + 1 }, name)));
$("line-of").append(...names.map((name, i) => element("option", { value: i }, name)));
$("beside").onchange = () => { other = Number($("beside").value); order = null; showHead(); showRows(); if (chosen) showDetail(find(chosen)); };
$("line-of").onchange = () => { shown = Number($("line-of").value); marked = null; showKeys(); drawLine(); };

window.addEventListener("resize", drawLine);
window.addEventListener("beforeprint", () => { modules(told.root).slice(0, 200).forEach((row) => open.add(row.id)); showRows(); drawLine(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawLine);
showHead();
showHeld();
showStages();
showKeys();
// Equal layers and a model of few parts are seen at once.
for (const row of modules(told.root)) if (told.root.children.length < 12 && row.parent === told.root && row.children.length < 12) open.add(row.id);
showRows();
drawLine();
