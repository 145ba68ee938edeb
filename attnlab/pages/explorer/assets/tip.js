// A note beside a box of a picture: below it and to its right, or where there is room; never over the box.

const GAP = 6;

export const placeBeside = (note, [x, y, width, height], { scroller, node, follow }) => {
  // A box that the keyboard has reached is scrolled to.
  if (follow && x < scroller.scrollLeft) scroller.scrollLeft = x;
  if (follow && x + width > scroller.scrollLeft + scroller.clientWidth) scroller.scrollLeft = x + width - scroller.clientWidth;
  const [left, top] = [scroller.offsetLeft + x - scroller.scrollLeft, scroller.offsetTop + y];
  const [wide, high] = [note.offsetWidth, note.offsetHeight];
  const right = left + width + GAP;
  const beside = right + wide <= node.clientWidth ? right : left - GAP - wide;
  const below = top + height + GAP;
  const fits = node.getBoundingClientRect().top + below + high <= (globalThis.innerHeight || Infinity);
  note.style.left = `${Math.max(0, Math.min(node.clientWidth - wide, beside))}px`;
  note.style.top = `${fits || follow ? below : top - GAP - high}px`;
  if (follow) note.scrollIntoView({ block: "nearest", inline: "nearest" });
};
