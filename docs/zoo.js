// Filters and sorts the table of models. Without this script the table is simply there.
document.querySelectorAll(".zoo table").forEach((table) => {
  const chinese = document.documentElement.lang.startsWith("zh");
  const words = chinese
    ? ["按名称筛选", "参数量上限（M）", "acc1 下限（%）", "个模型"]
    : ["filter by name", "most parameters (M)", "least acc1 (%)", "models"];
  const [ACC1, PARAMETERS, WEIGHTS] = [1, 3, 5]; // columns
  const heads = [...table.tHead.rows[0].cells];
  const rows = [...table.tBodies[0].rows].map((row) => {
    const cells = [...row.cells].map((cell) => cell.textContent.trim());
    return { row, cells, text: cells.join(" ").toLowerCase() };
  });
  const number = (text) => parseFloat(text.replaceAll(",", ""));

  const form = document.createElement("form");
  Object.assign(form, { className: "models-filter", onsubmit: () => false });
  const [name, most, least] = words.slice(0, 3).map((word, index) => {
    const input = document.createElement("input");
    Object.assign(input, index ? { type: "number", min: 0, step: "any" } : { type: "search" });
    Object.assign(input, { placeholder: word, ariaLabel: word, oninput: filter });
    return form.appendChild(input);
  });
  const count = form.appendChild(document.createElement("output"));

  function filter() {
    const parts = name.value.toLowerCase().split(/\s+/);
    let shown = 0;
    for (const { row, cells, text } of rows) {
      row.hidden =
        !parts.every((part) => text.includes(part)) ||
        (most.value !== "" && number(cells[PARAMETERS]) > most.valueAsNumber) ||
        (least.value !== "" && !(number(cells[ACC1]) >= least.valueAsNumber));
      shown += !row.hidden;
    }
    count.value = `${shown} ${words[3]}`;
  }

  function sort(column, head) {
    const down = head.ariaSort !== "descending" && (head.ariaSort === "ascending" || column === ACC1);
    heads.forEach((other) => (other.ariaSort = "none"));
    head.ariaSort = down ? "descending" : "ascending";
    const key = ({ cells }) => (column > 0 && column < WEIGHTS ? number(cells[column]) : cells[column]);
    const empty = (value) => value === "" || Number.isNaN(value); // these come last
    rows.sort((one, two) => {
      const [a, b] = [key(one), key(two)];
      if (empty(a) || empty(b)) return empty(a) - empty(b);
      return (a > b ? 1 : a < b ? -1 : 0) * (down ? -1 : 1);
    });
    table.tBodies[0].append(...rows.map(({ row }) => row));
  }

  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    button.onclick = () => sort(column, head);
    head.append(button);
  });
  table.closest(".zoo").prepend(form);
  filter();
});
