// Sphinx's search, made for pasted errors: those of five words and more are looked up by their class, if it is one of this library, or
// else without paths, names and numbers; then the page on errors comes first. Pages that nobody looks for answers in come last.
{
  const asked = new URLSearchParams(window.location.search);
  const words = (asked.get("q") ?? "").split(/\s+/);
  const isPasted = words.length > 4;
  if (isPasted) {
    const ours = words.join(" ").match(/flax_ckpt_compat\.(?:\w+\.)*(\w+Error)/);
    asked.set("q", ours ? ours[1] : words.filter((word) => !/[/\d{}'"]|Error:$/.test(word)).join(" "));
    window.history.replaceState(null, "", `?${asked}`);
  }
  var Scorer = {
    score: ([docname, , , , score]) =>
      score + (isPasted && docname === "troubleshooting" ? 20 : 0) - (["changelog", "results"].includes(docname) ? 20 : 0),
    // Sphinx's defaults.
    objNameMatch: 11,
    objPartialMatch: 6,
    objPrio: { 0: 15, 1: 5, 2: -5 },
    objPrioDefault: 0,
    title: 15,
    partialTitle: 7,
    term: 5,
    partialTerm: 2,
  };
}
