"""KTIW's recurrent models: an LSTM translator and an LSTM classifier, and many of them stacked into one."""
