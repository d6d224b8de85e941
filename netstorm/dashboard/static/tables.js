"use strict";
// Sortable tables that are updated in place: whoever reads, scrolls or selects is not disturbed each second.
class LiveTable {
  // columns: {name, value(row) to sort by, text(row), kind: "left" or "text" or none}
  constructor(table, columns, { sort = null, descending = false, most = 600, onChoose = null } = {}) {
    this.columns = columns;
    this.sort = sort;
    this.descending = descending;
    this.most = most;
    this.rows = [];
    this.chosen = null;
    const line = table.createTHead().insertRow();
    this.heads = columns.map((column, index) => {
      const head = document.createElement("th"), button = document.createElement("button");
      head.scope = "col";
      head.className = column.kind ? "left" : "";
      button.type = "button";
      button.textContent = column.name;
      button.addEventListener("click", () => {
        this.descending = this.sort === index ? !this.descending : false;
        this.sort = index;
        this.show(this.rows);
      });
      head.append(button);
      line.append(head);
      return head;
    });
    this.body = table.createTBody();
    if (onChoose) {
      this.body.addEventListener("click", (event) => {
        const row = event.target.closest("tr");
        if (row) onChoose(this.sorted[row.sectionRowIndex]);
      });
    }
  }

  show(rows) {
    this.rows = rows;
    this.sorted = this.sort === null ? rows : [...rows].sort((one, other) => this.order(one, other));
    this.sorted = this.sorted.slice(0, this.most);
    this.heads.forEach((head, index) => {
      if (index === this.sort) head.setAttribute("aria-sort", this.descending ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    while (this.body.rows.length > this.sorted.length) this.body.deleteRow(-1);
    this.sorted.forEach((row, index) => this.fill(this.body.rows[index] || this.newRow(), row));
  }

  order(one, other) {
    const value = this.columns[this.sort].value;
    const first = value(one) ?? null, second = value(other) ?? null;
    if (first === null || second === null) return (first === null) - (second === null); // unknown ones last
    const sign = first < second ? -1 : first > second ? 1 : 0;
    return this.descending ? -sign : sign;
  }

  newRow() {
    const line = this.body.insertRow();
    for (const column of this.columns) line.insertCell().className = column.kind || "";
    return line;
  }

  fill(line, row) {
    this.columns.forEach((column, index) => {
      const cell = line.cells[index], text = column.text(row);
      if (cell.textContent !== text) cell.textContent = text; // as text: names come from the wire
      if (column.state) cell.className = `${column.kind || ""} ${column.state(row)}`;
    });
    line.classList.toggle("chosen", this.chosen !== null && this.chosen(row));
  }
}
