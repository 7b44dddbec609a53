// Sphinx's scores, by which a page is as good as its best word. Among equals, recipes come first; a heading that holds all
// of the query comes before anything else.
var Scorer = {
  score: ([page, , , , score, , kind]) => score + (kind === "title" ? 10 : 0) + (page.startsWith("how_to/") ? 1 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
