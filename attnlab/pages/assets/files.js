// Downloads: rows as CSV, and saving a file. Reports and the explorer share them.

export const save = (name, blob) => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
};

const quoted = (value) => {
  const text = value === null || value === undefined || Number.isNaN(value) ? "" : String(value);
  // A text that begins like a formula is quoted, so that a spreadsheet does not run it.
  const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? "'" + text : text;
  return /[",\n\r]/.test(safe) ? '"' + safe.replaceAll('"', '""') + '"' : safe;
};

export const csvOf = ({ columns, rows }) => [columns, ...rows].map((row) => row.map(quoted).join(",")).join("\r\n") + "\r\n";
