// What every page does: the theme that the reader chose, tables that sort and unfold.
function theme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  const apply = () => {
    document.documentElement.dataset.theme = chosen ?? (dark.matches ? "dark" : "light");
    dispatchEvent(new Event("themechange"));
  };
  dark.addEventListener("change", apply);
  $("theme").addEventListener("click", () => {
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    apply();
  });
  apply();
}

function sorting(which) {
  for (const table of document.querySelectorAll(which)) {
    const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
    heads.forEach((head, at) => head.firstElementChild.addEventListener("click", () => {
      const number = head.classList.contains("n"), down = head.ariaSort !== (number ? "descending" : "ascending") ? number : !number;
      for (const other of heads) other.ariaSort = "none";
      head.ariaSort = down ? "descending" : "ascending";
      const value = (row) => number ? Number(row.cells[at].dataset.v) : row.cells[at].textContent.trim().toLowerCase();
      const rows = [...body.rows].sort((a, b) => { const x = value(a), y = value(b); return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1); });
      const all = !body.querySelector(".more[hidden]");
      rows.forEach((row, i) => { row.className = i >= 12 ? "more" : ""; row.hidden = i >= 12 && !all; });
      body.append(...rows);
    }));
  }
  for (const button of document.querySelectorAll(".all")) button.addEventListener("click", () => {
    for (const row of button.parentElement.querySelectorAll(".more")) row.hidden = false;
    button.remove();
  });
}
