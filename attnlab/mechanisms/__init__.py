"""One mechanism, one file. Every module here is found by ``attnlab.registry``; nothing is listed by hand."""
