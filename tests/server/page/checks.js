// Run in the page by test_page_access.py.

/** How many elements are seen that have text of their own, and those with a contrast below 4.5 (WCAG 2). */
const contrast = () => {
  const canvas = document.createElement("canvas");
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data];
  };
  const over = (top, below) => below.map((value, at) => (at < 3 ? (top[at] * top[3] + value * (255 - top[3])) / 255 : 255));
  const ground = (node) => {
    const own = rgba(getComputedStyle(node).backgroundColor);
    if (own[3] === 255) return own;
    return over(own, node.parentElement ? ground(node.parentElement) : [255, 255, 255, 255]);
  };
  const light = (colour) => {
    const [r, g, b] = colour.slice(0, 3).map((value) => {
      const share = value / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const low = [];
  let seen = 0;
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own && !node.matches("textarea, input")) continue;
    if (!node.checkVisibility({ opacityProperty: true, visibilityProperty: true }) || node.closest(".unseen, canvas")) continue;
    if (node.matches(":disabled") || node.closest(".skip, [inert]")) continue;
    const below = ground(node);
    const ratio = (() => {
      const [a, b] = [light(over(rgba(getComputedStyle(node).color), below)), light(below)].sort((x, y) => y - x);
      return (a + 0.05) / (b + 0.05);
    })();
    seen += 1;
    if (ratio < 4.5) low.push(`${ratio.toFixed(2)} ${node.localName}.${node.className} ${node.textContent.slice(0, 30)}`);
  }
  return [seen, low];
};

/** What is wrong with names, ids, references, headings, sizes and widths. */
const faults = () => {
  const faults = [];
  const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
  for (const id of ids) if (ids.filter((other) => other === id).length > 1) faults.push(`id ${id} twice`);
  for (const name of ["aria-labelledby", "aria-describedby", "aria-controls", "for", "popovertarget"]) {
    for (const node of document.querySelectorAll(`[${name}]`)) {
      if (!ids.includes(node.getAttribute(name))) faults.push(`${name} ${node.getAttribute(name)} leads nowhere`);
    }
  }
  for (const node of document.querySelectorAll("button, a[href], input, textarea, select, summary, [tabindex='0'], dialog, nav, section")) {
    if (!node.checkVisibility({ visibilityProperty: true })) continue;
    const labels = [...(node.labels ?? [])].map((label) => label.textContent).join("");
    const named = document.getElementById(node.getAttribute("aria-labelledby"))?.textContent;
    const content = node.matches("button, a, summary") ? node.textContent : "";
    if (!(node.getAttribute("aria-label") || labels || named || content).trim()) faults.push(`no name: ${node.outerHTML.slice(0, 80)}`);
    if (!node.matches("button, a.button, a.row, .icon")) continue;
    const { width, height } = node.getBoundingClientRect();
    if (width < 24 || height < 24) faults.push(`${width} x ${height}: ${node.outerHTML.slice(0, 80)}`);
  }
  for (const node of document.querySelectorAll("img")) if (!node.hasAttribute("alt")) faults.push("an image without alt");
  const levels = [...document.querySelectorAll("main :is(h1,h2,h3,h4,h5,h6)")].filter((node) => node.checkVisibility());
  if (levels.filter((node) => node.localName === "h1").length !== 1) faults.push("not one h1");
  if (document.documentElement.scrollWidth > innerWidth) faults.push(`${document.documentElement.scrollWidth} px wide`);
  for (const node of document.querySelectorAll("#messages > *, .card, .view > header, dialog[open]")) {
    const { left, right } = node.getBoundingClientRect();
    if (node.checkVisibility() && (left < -1 || right > innerWidth + 1)) faults.push(`out of sight: ${node.className}`);
  }
  return faults;
};
