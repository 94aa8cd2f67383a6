// Saves a section's picture as an SVG file of its own: with its heading and legend, and the page's styles written out.

const PAINTED = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "opacity"];
const WRITTEN = ["font-family", "font-size", "font-weight", "text-anchor"];
const NAMESPACE = "http://www.w3.org/2000/svg";

// A copy of a picture that needs no style sheet.
function standalone(picture) {
  const copy = picture.cloneNode(true);
  copy.querySelectorAll("style").forEach((style) => style.remove());
  const originals = [picture, ...picture.querySelectorAll("*:not(style)")];
  [copy, ...copy.querySelectorAll("*")].forEach((node, index) => {
    const plain = !node.hasAttribute("class") && !/var\(/.test(`${node.getAttribute("fill")}${node.getAttribute("stroke")}`);
    if (node.localName !== "text" && plain) return;
    const style = getComputedStyle(originals[index]);
    const names = node.localName === "text" ? [...PAINTED, ...WRITTEN] : PAINTED;
    node.removeAttribute("class");
    if (node !== copy) names.forEach((name) => node.setAttribute(name, style.getPropertyValue(name)));
  });
  return copy;
}

// The lines of text of an element, each where the page shows it.
function* textLines(root) {
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const range = document.createRange();
    range.selectNodeContents(node);
    const box = range.getBoundingClientRect();
    if (node.data.trim() && box.width) yield { text: node.data.trim(), box, style: getComputedStyle(node.parentElement) };
  }
}

// The whole section as one picture.
function sectionPicture(section) {
  const frame = section.getBoundingClientRect();
  const result = document.createElementNS(NAMESPACE, "svg");
  const add = (name, attributes, text = "") => {
    const node = document.createElementNS(NAMESPACE, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(text);
    result.append(node);
  };
  add("title", {}, section.querySelector("h2").textContent);
  add("rect", { width: "100%", height: "100%", fill: getComputedStyle(section).backgroundColor });
  let [right, bottom] = [0, 0];
  const place = (box) => {
    right = Math.max(right, box.right - frame.left);
    bottom = Math.max(bottom, box.bottom - frame.top);
    return { x: box.left - frame.left, y: box.top - frame.top };
  };
  for (const root of section.querySelectorAll("h2, .legend, .panel-title")) {
    for (const { text, box, style } of textLines(root)) {
      const { x, y } = place(box);
      const font = Object.fromEntries(["font-family", "font-size", "font-weight"].map((name) => [name, style.getPropertyValue(name)]));
      add("text", { x, y: y + 0.78 * box.height, fill: style.color, ...font }, text);
    }
  }
  for (const picture of section.querySelectorAll("svg:not(table svg)")) {
    const box = picture.getBoundingClientRect();
    const copy = standalone(picture);
    if (!copy.hasAttribute("viewBox")) copy.setAttribute("viewBox", `0 0 ${box.width} ${box.height}`);
    copy.removeAttribute("style");
    const { x, y } = place(box);
    for (const [key, value] of Object.entries({ x, y, width: box.width, height: box.height })) copy.setAttribute(key, value);
    result.append(copy);
  }
  const [width, height] = [Math.ceil(right + 16), Math.ceil(bottom + 16)];
  for (const [key, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}` })) result.setAttribute(key, value);
  return result;
}

function savePicture(section) {
  const text = new XMLSerializer().serializeToString(sectionPicture(section));
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
  const words = [document.querySelector("h1").textContent, section.id || section.querySelector("h2").textContent];
  link.download = `${words.map((one) => one.trim().replace(/[^\w-]+/g, "-").slice(0, 60)).join("-")}.svg`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// Without scripts the buttons would do nothing, so they are hidden until now. Live pages add more of them.
document.querySelectorAll("button.save").forEach((button) => button.removeAttribute("hidden"));
document.addEventListener("click", (event) => {
  const button = event.target.closest("button.save");
  if (button) savePicture(button.closest("section"));
});
