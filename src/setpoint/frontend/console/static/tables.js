// A table whose rows are updated in place, so that a selection in it survives; sorted by the column
// whose heading is clicked, and filtered by words.

import { make, setText } from "./dom.js";

export class Table {
  /**
   * columns: [{label, value(row), text(row), number, title, button: {press(row), title(row)}}]; value
   * is what rows are sorted by; with a button, the text is that of a button, and "" means none.
   * key(row): names a row for as long as it exists. none, noMatch: what an empty table says, without
   * rows and with none that match its filter. Without a sorted column rows keep the order that they
   * come in.
   */
  constructor(table, caption, columns, { key, none, noMatch }) {
    this.columns = columns;
    this.key = key;
    this.none = none;
    this.noMatch = noMatch;
    this.sorted = null;
    this.words = [];
    this.filterText = "";
    this.rows = [];
    this.elements = new Map();
    this.heads = columns.map((column, index) =>
      make(
        "th",
        { scope: "col", class: column.number ? "number" : null, title: column.title },
        make("button", { type: "button", onclick: () => this.sort(index) }, column.label),
      ),
    );
    this.body = make("tbody");
    this.nothing = make("td", { colspan: columns.length, class: "empty" });
    this.nothingRow = make("tr", {}, this.nothing);
    table.append(
      make("caption", { class: "sr" }, caption),
      make("thead", {}, make("tr", {}, ...this.heads)),
      this.body,
    );
  }

  sort(index) {
    const isSame = this.sorted?.index === index;
    if (isSame && this.sorted.descending !== Boolean(this.columns[index].number)) this.sorted = null;
    else this.sorted = { index, descending: isSame !== Boolean(this.columns[index].number) };
    this.heads.forEach((head, number) => {
      if (this.sorted?.index !== number) head.removeAttribute("aria-sort");
      else head.setAttribute("aria-sort", this.sorted.descending ? "descending" : "ascending");
    });
    this.draw();
  }

  filter(text) {
    this.filterText = text.trim();
    this.words = text.toLowerCase().split(/\s+/).filter(Boolean);
    this.draw();
  }

  show(rows) {
    this.rows = rows;
    this.draw();
  }

  draw() {
    const texts = this.rows.map((row) => [row, this.columns.map((column) => column.text(row))]);
    const found = texts.filter(([, cells]) => {
      const all = cells.join(" ").toLowerCase();
      return this.words.every((word) => all.includes(word));
    });
    if (this.sorted) {
      const { value } = this.columns[this.sorted.index];
      const sign = this.sorted.descending ? -1 : 1;
      found.sort(([one], [other]) => sign * compared(value(one), value(other)));
    }
    const before = this.elements;
    this.elements = new Map();
    for (const [row, cells] of found) {
      const key = this.key(row);
      const element = before.get(key) ?? this.element();
      this.elements.set(key, element);
      element.dataset.state = row.state ?? "";
      cells.forEach((text, index) => this.fill(element.cells[index], this.columns[index], row, text));
    }
    const wanted = found.length ? [...this.elements.values()] : [this.nothingRow];
    setText(this.nothing, this.rows.length ? `${this.noMatch} “${this.filterText}”.` : this.none);
    const isSame =
      wanted.length === this.body.children.length &&
      wanted.every((element, index) => element === this.body.children[index]);
    if (!isSame) this.body.replaceChildren(...wanted);
  }

  fill(cell, { button }, row, text) {
    if (!button) return setText(cell, text);
    const [present] = cell.children;
    if (!text) return cell.replaceChildren();
    const shown = present ?? make("button", { type: "button", class: "button small" });
    shown.onclick = () => button.press(row);
    shown.setAttribute("aria-label", button.title(row));
    setText(shown, text);
    if (!present) cell.append(shown);
  }

  element() {
    const cells = this.columns.map(({ number, className }) =>
      make("td", { class: [number && "number", className].filter(Boolean).join(" ") || null }),
    );
    return make("tr", {}, ...cells);
  }
}

/** What is not known comes last, whichever way the rest is sorted: it counts as the least. */
function compared(one, other) {
  const [left, right] = [one ?? -Infinity, other ?? -Infinity];
  return left < right ? -1 : left > right ? 1 : 0;
}
