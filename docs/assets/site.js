// What scrolls sideways on a narrow screen, wide tables and equations, is reached by keyboard.
function reachScrolling() {
    for (const node of document.querySelectorAll(".md-typeset__scrollwrap, .math, .cell-output")) {
        if (node.scrollWidth > node.clientWidth) node.tabIndex = 0;
        else node.removeAttribute("tabindex");
    }
}
// The theme wraps tables when it has drawn the page.
document$.subscribe(() => requestAnimationFrame(reachScrolling));
addEventListener("resize", reachScrolling);
