// Run in the page: what a person could see wrong with it. Lengths are CSS pixels, contrasts those of WCAG 2.
() => {
  const box = (e) => e.getBoundingClientRect();
  const shades = (colour) => (colour.match(/[\d.]+/g) || []).map(Number);
  const light = (colour) => {
    const [r, g, b] = shades(colour).slice(0, 3).map((n) => n / 255)
      .map((n) => (n <= 0.04045 ? n / 12.92 : ((n + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (e) => {
    for (let at = e; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (!/^rgba\(.*, 0\)$/.test(colour)) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const contrast = (front, back) => {
    const [low, high] = [light(front), light(back)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const apart = (a, b) => a.right <= b.left + 0.5 || b.right <= a.left + 0.5 || a.bottom <= b.top + 0.5 || b.bottom <= a.top + 0.5;

  const charts = [...document.querySelectorAll("svg")].map((svg) => {
    const edge = box(svg);
    const texts = [...svg.querySelectorAll("text")];
    const scale = edge.width / svg.viewBox.baseVal.width;
    const outside = texts.filter((t) => {
      const b = box(t);
      return b.left < edge.left - 1 || b.right > edge.right + 1 || b.top < edge.top - 1 || b.bottom > edge.bottom + 1;
    });
    const overlaps = [];
    texts.forEach((a, i) => texts.slice(i + 1).forEach((b) => {
      if (!apart(box(a), box(b))) overlaps.push(`${a.textContent} | ${b.textContent}`);
    }));
    const drawn = [...svg.querySelectorAll("polyline, rect, circle")];
    return {
      label: svg.getAttribute("aria-label"),
      width: edge.width,
      height: edge.height,
      drawn: drawn.filter((e) => box(e).width > 0 && (e.tagName === "polyline" || box(e).height > 0)).length,
      smallestText: Math.min(...texts.map((t) => parseFloat(getComputedStyle(t).fontSize) * scale)),
      outside: outside.map((t) => t.textContent),
      overlaps,
      faintest: Math.min(...drawn.map((e) => {
        const style = getComputedStyle(e);
        return contrast(e.tagName === "polyline" ? style.stroke : style.fill, behind(svg));
      })),
      faintestText: Math.min(...texts.map((t) => contrast(getComputedStyle(t).fill, behind(svg)))),
    };
  });

  const words = [...document.querySelectorAll("body *")].filter(
    (e) => !e.closest("svg, style, script") && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()));
  const scrolls = (e) => {
    const style = getComputedStyle(e);
    return (/auto|scroll/.test(style.overflowX) && e.scrollWidth > e.clientWidth + 1)
      || (/auto|scroll/.test(style.overflowY) && e.scrollHeight > e.clientHeight + 1);
  };
  // What the page itself lets act or scroll. A scrolling box counts even where the markup forgot it.
  const interactive = [...document.querySelectorAll("body *")].filter(
    (e) => e.matches("a[href], button, input, select, textarea, summary, [tabindex]") || scrolls(e));
  window.focused = () => {
    const e = document.activeElement;
    if (!e || e === document.body || e === document.documentElement) return null;
    const style = getComputedStyle(e);
    return { index: interactive.indexOf(e), outline: style.outlineStyle === "none" ? 0 : parseFloat(style.outlineWidth) };
  };
  return {
    dark: light(getComputedStyle(document.body).backgroundColor) < 0.2,
    tooWide: document.documentElement.scrollWidth - window.innerWidth,
    charts,
    smallestText: Math.min(...words.map((e) => parseFloat(getComputedStyle(e).fontSize))),
    faintestText: Math.min(...words.map((e) => contrast(getComputedStyle(e).color, behind(e)))),
    cutOff: words.filter((e) => !e.closest(".scroll") && box(e).right > window.innerWidth + 1).map((e) => e.textContent),
    interactive: interactive.map((e) => ({
      tag: e.tagName.toLowerCase(),
      name: e.getAttribute("aria-label") || e.textContent.trim().slice(0, 40),
      named: e.hasAttribute("aria-label") || !e.matches("[tabindex]"),
      marked: e.matches("a[href], button, input, select, textarea, summary, [tabindex]"),
    })),
  };
}
