// One page about one run. `told` is what document.py wrote.
const plan = told.plan, ranks = told.ranks;
const telling = ranks.filter((rank) => rank.mean);

// ---- words

const inTime = (s) => (s === undefined || s === null ? "-" : s < 1e-12 ? "0" : unit(s, [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]));
const number = (n) => (n === undefined || n === null ? "-" : Number(n.toPrecision(5)).toString());
const clock = (s) => `${Math.floor(s / 3600)}:${String(Math.floor(s / 60) % 60).padStart(2, "0")}:${String(Math.floor(s) % 60).padStart(2, "0")}`;
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;

// ---- the head

function showHead() {
  $("title").textContent = told.job;
  $("command").textContent = told.command.join(" ");
  const hosts = new Set(ranks.map((rank) => rank.host).filter(Boolean)).size;
  const parts = [`${told.end} after ${clock(told.seconds)}, ${plural(ranks.length, "rank")}${hosts > 1 ? ` on ${hosts} hosts` : ""}`];
  if (told.restarts) parts.push(plural(told.restarts, "restart"));
  const first = telling[0];
  if (first) {
    const last = first.curve[first.curve.length - 1];
    parts.push(`step ${last.step}`);
    if (last.loss !== undefined) parts.push(`loss ${number(last.loss)}`);
    if (first.mean.rate) parts.push(`${number(first.mean.rate)} samples/s`);
  } else parts.push("its ranks told of no step");
  $("sentence").textContent = parts.join("; ") + ".";
}

// ---- curves

// Round numbers between which the values lie.
function ticks(low, high, most) {
  const span = high - low || Math.abs(high) || 1, raw = span / most, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= raw) * power, found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}
// The least and the largest; Math.min(...values) takes no more arguments than the stack has room for.
const ends = (values) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
// Each series: {name, points: [[step, value]], colour, dots, dashed}.
function chart(id, series, say, fromZero) {
  const all = series.flatMap((one) => one.points);
  if (all.length === 0) { $(id).replaceChildren(element("p", { className: "said" }, "Nothing was told.")); return; }
  const width = 1000, height = 260, left = 76, bottom = 34, top = 10, right = 12;
  const steps = all.map(([step]) => step), values = all.map(([, value]) => value);
  const [x0, x1] = ends(steps), [least, y1] = ends(values), y0 = fromZero ? 0 : least;
  const pad = (y1 - y0) * 0.05 || Math.abs(y1) * 0.05 || 1, low = fromZero ? 0 : y0 - pad, high = y1 + pad;
  const x = (step) => left + ((step - x0) / (x1 - x0 || 1)) * (width - left - right);
  const y = (value) => top + (1 - (value - low) / (high - low)) * (height - top - bottom);
  const picture = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": series.map((one) => one.name).join(", ") });
  for (const value of ticks(low, high, 5)) {
    picture.append(drawn("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
      drawn("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, say(value)));
  }
  for (const step of ticks(x0, x1, 8)) {
    if (Number.isInteger(step)) picture.append(drawn("text", { x: x(step), y: height - 16, "text-anchor": "middle" }, step));
  }
  picture.append(drawn("text", { x: width - right, y: height - 2, "text-anchor": "end" }, "step"));
  series.forEach((one, i) => {
    const stroke = one.colour ?? colour(i);
    if (one.dots || one.points.length === 1) {
      for (const [step, value] of one.points) picture.append(drawn("circle", { cx: x(step), cy: y(value), r: 3.5, fill: stroke }));
    } else {
      const path = one.points.map(([step, value], at) => `${at ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
      picture.append(drawn("path", { d: path, fill: "none", stroke, "stroke-width": 1.6, ...(one.dashed ? { "stroke-dasharray": "6 4" } : {}) }));
    }
  });
  const said = element("p", { className: "said", role: "status" });
  picture.addEventListener("mousemove", (event) => {
    const box = picture.getBoundingClientRect();
    const step = x0 + ((((event.clientX - box.left) / box.width) * width - left) / (width - left - right)) * (x1 - x0);
    const near = series.slice(0, 8).map((one) => {
      const found = one.points.reduce((best, point) => (Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best));
      return `${one.name} ${say(found[1])}${one.dashed ? "" : ` at step ${found[0]}`}`;
    });
    said.textContent = near.join("; ");
  });
  const legend = element("p", { className: "legend" });
  series.slice(0, 12).forEach((one, i) => {
    const key = element("i");
    key.style.background = one.colour ?? colour(i);
    legend.append(element("span", {}, key, ` ${one.name}`), " ");
  });
  if (series.length > 12) legend.append(`and ${series.length - 12} more`);
  $(id).replaceChildren(picture, legend, said);
}
const points = (rank, name) => rank.curve.filter((point) => point[name] !== undefined && point[name] !== null).map((point) => [point.step, point[name]]);

function showCurves() {
  const first = telling.find((rank) => points(rank, "loss").length);
  const metrics = [...new Set(told.validations.flatMap(([, values]) => Object.keys(values)))];
  const losses = first ? [{ name: "loss", points: points(first, "loss") }] : [];
  const validated = told.validations.filter(([, values]) => values.loss !== undefined).map(([step, values]) => [step, values.loss]);
  if (validated.length) losses.push({ name: "loss of validations", points: validated, dots: true });
  chart("loss", losses, number, false);
  const others = metrics.filter((name) => name !== "loss");
  if (others.length) {
    const list = element("p", {}, "Last validation: " + others.map((name) => {
      const last = told.validations.filter(([, values]) => values[name] !== undefined).at(-1);
      return `${name} ${number(last[1][name])}`;
    }).join(", ") + ".");
    $("loss").append(list);
  }
  const times = telling.map((rank) => ({ name: `rank ${rank.rank}`, points: points(rank, "seconds") }));
  if (plan && plan.seconds && times.length) {
    const steps = times[0].points.map(([step]) => step);
    if (steps.length) times.push({ name: "plan", colour: "var(--ink)", dashed: true, points: ends(steps).map((step) => [step, plan.seconds]) });
  }
  chart("seconds", times, inTime, true);
}

// ---- bars

function bar(name, parts, most, words) {
  const box = element("div", { className: "bar", role: "img" });
  for (const [what, value, colour, say] of parts) {
    if (!value) continue;
    const part = element("span", { title: `${what}: ${say(value)}` });
    part.style.cssText = `width:${(100 * value) / most}%;background:${colour}`;
    box.append(part);
  }
  box.setAttribute("aria-label", parts.filter(([, value]) => value).map(([what, value, , say]) => `${what} ${say(value)}`).join(", "));
  return element("div", { className: "held-row" }, element("span", {}, name), box, element("span", {}, words));
}
const split = (step) => (step.communicating === undefined
  ? [["a step", step.seconds, "var(--seven)", inTime]]
  : [["computes", step.computing, "var(--computes)", inTime], ["communicates", step.communicating, "var(--communicates)", inTime],
    ["loads data", step.loading, "var(--three)", inTime]]);
const MOST_BARS = 32;
function showBars() {
  const expected = plan ? { seconds: plan.seconds, computing: plan.computing_s, communicating: plan.communicating_s } : null;
  const shown = telling.slice(0, MOST_BARS);
  const most = Math.max(expected?.seconds ?? 0, ...shown.map((rank) => rank.mean.seconds ?? 0)) * 1.02 || 1;
  const rows = shown.map((rank) => bar(`rank ${rank.rank}`, split(rank.mean), most, inTime(rank.mean.seconds)));
  if (expected) rows.unshift(bar("plan", split(expected), most, inTime(expected.seconds)));
  $("steps").replaceChildren(...rows);
  const mean = shown.length ? shown.reduce((sum, rank) => sum + (rank.mean.seconds ?? 0), 0) / shown.length : 0;
  const more = telling.length > MOST_BARS ? ` Shown are ${MOST_BARS} of ${telling.length} ranks.` : "";
  $("steps-said").textContent = (expected && mean
    ? `A step took ${inTime(mean)} in the mean, ${(mean / expected.seconds).toPrecision(3)} times what the plan expects on ${plan.hardware}.` : "") + more;
  const holding = shown.filter((rank) => rank.mean.held !== undefined);
  const largest = Math.max(plan?.held_bytes ?? 0, ...holding.map((rank) => rank.mean.held)) * 1.02 || 1;
  const held = holding.map((rank) => bar(`rank ${rank.rank}`, [["held", rank.mean.held, "var(--one)", inBytes]], largest, inBytes(rank.mean.held)));
  if (plan?.held_bytes) held.unshift(bar("plan", [["expected", plan.held_bytes, "var(--seven)", inBytes]], largest, inBytes(plan.held_bytes)));
  $("held").replaceChildren(...held);
  $("held-said").textContent = "On a GPU the most that tensors took; on a CPU what the process held beside Python, torch and its libraries.";
}

// ---- the table of ranks

const COLUMNS = [
  ["rank", (rank) => rank.rank, String], ["host", (rank) => rank.host, String], ["steps", (rank) => rank.mean?.steps, number],
  ["a step", (rank) => rank.mean?.seconds, inTime], ["computes", (rank) => rank.mean?.computing, inTime],
  ["communicates", (rank) => rank.mean?.communicating, inTime], ["loads data", (rank) => rank.mean?.loading, inTime],
  ["held", (rank) => rank.mean?.held, inBytes], ["ended", (rank) => rank.end, String], ["", (rank) => rank.mark, String],
]; // the name, of what, and how it is said
let order = null;
function showRanks() {
  const head = element("tr", {}, ...COLUMNS.map(([title, of], at) => {
    const button = element("button", { type: "button" }, title || "mark");
    const cell = element("th", {}, button);
    if (order?.at === at) cell.setAttribute("aria-sort", order.sign < 0 ? "descending" : "ascending");
    button.onclick = () => { order = { at, of, sign: order?.at === at ? -order.sign : -1 }; showRanks(); };
    return cell;
  }));
  const compare = (a, b) => (typeof a === "string" ? String(a).localeCompare(String(b)) : (a ?? -1) - (b ?? -1));
  const rows = order ? [...ranks].sort((a, b) => order.sign * compare(order.of(a), order.of(b))) : ranks;
  $("ranks").tHead.replaceChildren(head);
  $("ranks").tBodies[0].replaceChildren(...rows.map((rank) => element("tr", rank.mark ? { className: "differs" } : {},
    ...COLUMNS.map(([, of, say]) => element("td", { className: typeof of(rank) === "number" ? "number" : "" }, say(of(rank)))))));
}

// ---- the rest

function showRest() {
  const measured = ranks.filter((rank) => rank.wire);
  $("wire-section").hidden = measured.length === 0;
  const steps = telling[0]?.mean.steps ?? 0;
  const expected = plan?.sent_bytes && steps ? `The plan sends ${inBytes(plan.sent_bytes)} a step from each device, in ${plural(steps, "step")} ${inBytes(plan.sent_bytes * steps)}.` : "";
  $("wire").replaceChildren(...measured.map((rank) => element("p", {},
    `${rank.host || `the host of rank ${rank.rank}`}: ${inBytes(rank.wire.in)} in and ${inBytes(rank.wire.out)} out between the first reading and the last, ` +
    `${inBytes(rank.wire.within)} by its loopback. Whatever else used the devices is in that.`)), element("p", { className: "said" }, expected));
  $("events-section").hidden = told.events.length === 0;
  $("events").replaceChildren(...told.events.map((event) => element("li", {}, `${clock(Math.max(0, event.at - told.started_s))}: ${event.text}`)));
}

showHead();
showCurves();
showBars();
showRanks();
showRest();
