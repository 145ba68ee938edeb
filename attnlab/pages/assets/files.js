// What a page hands over as a file: rows as CSV, and the download itself. Reports and the explorer share it.

export const save = (name, blob) => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
};

const quoted = (value) => {
  const text = value === null || value === undefined || Number.isNaN(value) ? "" : String(value);
  // A cell that begins like a formula is text, not something a spreadsheet should run.
  const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? "'" + text : text;
  return /[",\n\r]/.test(safe) ? '"' + safe.replaceAll('"', '""') + '"' : safe;
};

export const csvOf = ({ columns, rows }) => [columns, ...rows].map((row) => row.map(quoted).join(",")).join("\r\n") + "\r\n";
