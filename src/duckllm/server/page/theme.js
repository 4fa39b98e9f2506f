// The colour scheme before anything is painted: the system's, or the one that was chosen.
// A classic script, as a module would run after the first paint.
(() => {
  try {
    const chosen = localStorage.getItem("duckllm.scheme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.scheme = chosen;
  } catch {
    // Storage is forbidden: the system's scheme it is.
  }
})();
