"""What the papers share: rows on disk, claims, parallel corpora, translation, fine-tuning, pages of results."""
