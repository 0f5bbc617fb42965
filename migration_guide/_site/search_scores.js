// Sphinx's defaults, but the page on errors comes first for five words and more: these are mostly the message of an error.
var Scorer = {
  score: ([docname, , , , score]) => {
    const words = (new URLSearchParams(window.location.search).get("q") ?? "").trim().split(/\s+/);
    return docname === "troubleshooting" && words.length > 4 ? score + 20 : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
