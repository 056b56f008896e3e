CREATE ROLE aiodlock_owner LOGIN;
CREATE ROLE locker LOGIN;
-- The names of databases differ: this takes the one that you are connected to.
DO $$ BEGIN
  EXECUTE format('GRANT CONNECT ON DATABASE %I TO aiodlock_owner, locker', current_database());
  EXECUTE format('GRANT CREATE ON DATABASE %I TO aiodlock_owner', current_database());
END $$;
