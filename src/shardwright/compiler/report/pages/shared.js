"use strict";
// What the scripts of all pages begin with.
const told = JSON.parse(document.getElementById("told").textContent);
const $ = (id) => document.getElementById(id);
const COLOURS = ["--one", "--two", "--three", "--four", "--five", "--six", "--seven"];
const colour = (i) => `var(${COLOURS[i % COLOURS.length]})`;

// ---- words

const unit = (number, steps) => {
  const [name, factor] = steps.find(([, factor]) => number >= 0.9995 * factor) ?? steps[steps.length - 1];
  return `${(number / factor).toPrecision(3)} ${name}`.replace(/(\.\d*?)0+ /, "$1 ").replace(". ", " ");
};
const inBytes = (n) => (n === undefined || n === null ? "-" : n < 1 ? "0" : unit(n, [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["B", 1]]));

// ---- elements

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key in made && key !== "list") made[key] = value; else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

function drawn(name, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}
